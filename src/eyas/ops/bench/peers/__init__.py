"""Drivers of other trainers, each run by the interpreter of an environment that holds that trainer.

They see this folder and nothing else of eyas, so they import only ``protocol`` or
``quality_job`` and their own trainer.
"""
