"""eyas: capture a target's hidden states, train an EAGLE-3 drafter from them."""

__version__ = "0.1.0"
