"""The command ``eyas``: what is not a stage. Results go to stdout, progress and errors to stderr.

What a command does is in ``commands``.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from eyas import commands as run
from eyas import console, heap

MAKE_OPTIONS = (
    "boundaries", "confirm", "dir", "engine", "engines", "final-hidden", "format", "from", "max-failed", "name", "note",
    "projects", "remote", "sets", "to", "trainer-version",
)  # fmt: skip
"""Options that the Makefile gives from a variable of its own; all others go through ARGS."""
OPTION = re.compile(r"--([a-z][a-z-]*)")


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command; a user's mistake ends with exit code 2, a found difference with 1."""
    arguments = _parser().parse_args(argv)
    heap.keep_freed()
    with console.user_errors():
        sys.exit(arguments.run(arguments))


class _Parser(argparse.ArgumentParser):
    """Where make runs the command, an error names make's variables: nobody typed the options."""

    def error(self, message: str) -> NoReturn:
        """End with exit code 2."""
        if not os.environ.get("MAKELEVEL"):
            super().error(message)
        said = OPTION.sub(
            lambda found: f"{make_variable(found[1])}=" if found[1] in MAKE_OPTIONS else found[0], message
        )
        console.log(f"error: {said}\n\nhint: `make` lists the variables of each target")
        sys.exit(2)


def make_variable(option: str) -> str:
    """The Makefile's variable for one of ``MAKE_OPTIONS``."""
    return "TRAINER" if option == "trainer-version" else option.upper().replace("-", "_")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="eyas", description="Capture a target's hidden states and train an EAGLE-3 drafter. `make` lists the rest."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    params = _add(commands, "params", run.params, "compose presets of conf/ into params.yaml")
    params.add_argument(
        "choices",
        nargs="*",
        metavar="GROUP=PRESET",
        help="TARGET, DATA, MACHINE or DRAFTER, and a file below conf/GROUP; a group left out takes its default",
    )
    _add(commands, "doctor", run.doctor, "what this machine has, lacks and what to do about it")
    _add(commands, "changed", run.changed, "parameters that differ from those that each stage last ran with")
    _add(
        commands, "sglang-command", run.sglang_command, "how to start an SGLang server that an extraction can attach to"
    )
    _add(commands, "budget", run.budget, "whether the planned capture fits this volume, and what would make it fit")
    guard = _add(commands, "guard", run.guard, "look at the hidden states before a command of DVC's could wipe them")
    guard.add_argument("--force", action="store_true", help="go on although finished states would be deleted")
    guard.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="COMMAND", help="then run this, for example dvc repro train"
    )
    _add(
        commands, "settle", run.settle, "remove what an extraction kept beside its published states, once DVC has them"
    )
    _add_states(commands)
    _add_gc(commands)
    _add_looks(commands)
    _add_exchange(commands)
    _add_drafters(commands)
    _add_generations(commands)
    _add_bench(commands)
    parity = _add(commands, "parity", run.parity, "engines beside transformers in float32; writes reports/parity.json")
    parity.add_argument("--engines", default="hf,sglang", help="of hf, sglang, vllm, with commas (%(default)s)")
    parity.add_argument("--samples", type=int, default=64, help="prompts of 10 to 1,500 tokens (%(default)s)")
    _add_serve(commands)
    _add_simulate(commands)
    _add_rehearsals(commands)
    return parser


def _add_states(commands: argparse._SubParsersAction) -> None:
    verify = _add(commands, "verify", run.verify, "read every artifact again; states also against tokens and target")
    verify.add_argument("--share", type=float, default=1.0, help="read this share of the shards (default: all)")
    verify.add_argument("--max-mb-per-s", type=float, default=0.0, help="read no faster (default: no limit)")
    verify.add_argument(
        "--remote",
        nargs="?",
        const="",
        metavar="NAME",
        help="the states on a DVC remote instead (default: DVC's default one)",
    )
    for name, text in (("push", "to a DVC remote, and ask it for each"), ("pull", "from a DVC remote, and read each")):
        moved = _add(
            commands, name, getattr(run, name), f"hidden states and their manifest {text}; goes on where it stopped"
        )
        moved.add_argument("--remote", default="", metavar="NAME", help="of the remote (default: DVC's default one)")
    _add(commands, "train-far", run.train_far, "the train stage with its states on a remote, noted in dvc.lock")
    _add(commands, "repair", run.repair, "restore damaged shards from DVC's cache, or capture their samples again")


def _add_gc(commands: argparse._SubParsersAction) -> None:
    plan = _add(commands, "gc-plan", run.gc_plan, "what nobody needs any more, and what deleting it would free")
    plan.add_argument("--projects", help="other projects that share DVC's cache: '/path /path', or none")
    gc = _add(commands, "gc", run.gc, "delete what a plan of gc-plan lists, and go on with a gc that was interrupted")
    gc.add_argument("--confirm", default="", metavar="ID", help="the plan's id")


def _add_rehearsals(commands: argparse._SubParsersAction) -> None:
    smoke = _add(commands, "smoke", run.smoke, "run the whole pipeline at small size in a scratch copy")
    smoke.add_argument("--folder", type=Path, default=Path(".eyas/smoke"), help="the copy (default: %(default)s)")
    reproduce = _add(commands, "reproduce", run.reproduce, "run small twice from nothing and compare every hash")
    reproduce.add_argument(
        "--folder", type=Path, default=Path(".eyas/reproduce"), help="holds both copies (default: %(default)s)"
    )
    pivot = _add(
        commands, "scenario-pivot", run.scenario_pivot, "from one engine to another on a volume that does not hold both"
    )
    pivot.add_argument("--from", dest="first", default="fake", help="engine whose states are in the way (%(default)s)")
    pivot.add_argument("--to", dest="second", default="hf", help="engine that is wanted (%(default)s)")


def _add_looks(commands: argparse._SubParsersAction) -> None:
    _add(commands, "summary", run.summary, "the last results in one table")
    other = _add(
        commands,
        "compare",
        run.compare,
        "this run beside another revision's, read from git and DVC's cache; writes reports/against.html",
    )
    other.add_argument("--known", action="store_true", help="only look whether there is such a revision")
    other.add_argument("revision", metavar="REV", help="branch, tag, commit or DVC experiment")
    listed = _add(
        commands, "generations", run.generations, "every version of the hidden states, and what gc would free"
    )
    listed.add_argument("--all", action="store_true", help="also those that only commits name, and deleted ones")


def _add_bench(commands: argparse._SubParsersAction) -> None:
    bench = _add(
        commands,
        "bench",
        run.bench,
        "measure store and trainer on the extracted states; writes reports/bench/NAME.json",
    )
    bench.add_argument(
        "name",
        choices=("store", "crash", "corruption", "faults", "gc", "train", "train-quality"),
        help="bytes and speeds (3 minutes), 200 kills (2 to 4), damage and who finds it (2); the states are only read. "
        "faults: a real SGLang made to fail in ten ways (10). gc: promised and measured bytes, a plan over 80,000 objects (1). train: speed, memory and loss beside other "
        "trainers (15), each with an environment below .eyas/bench/peers that the first run makes; the path of a python "
        "in EYAS_PEER_SPECULATORS or EYAS_PEER_SPECFORGE is taken instead. train-quality: tau beside them (hours on a CPU)",
    )
    peers_help = "of train, train-quality: whom to measure, or none (%(default)s)"
    bench.add_argument("--peers", default="speculators,specforge", help=peers_help)
    bench.add_argument("--rounds", type=int, default=5, help="of train: passes over the data that count (%(default)s)")
    device_help = (
        "of train: on a CPU the states of this repository, on a GPU made-up ones of an 8B target (%(default)s)"
    )
    bench.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=device_help)
    share_help = "of train on a CPU: of the rows that train; 0: those of the answers (%(default)s)"
    bench.add_argument("--share", type=float, default=0.0, help=share_help)
    bench.add_argument("--seeds", type=int, default=3, help="of train-quality: drafters of each trainer (%(default)s)")
    bench.add_argument("--jobs", type=int, default=1, help="of train-quality: peers side by side (%(default)s)")


def _add_serve(commands: argparse._SubParsersAction) -> None:
    serve = _add(
        commands, "serve-bench", run.serve_bench, "a real server with the exported drafter; writes reports/serve.json"
    )
    serve.add_argument(
        "--sets",
        default="human_eval",
        help="prompt sets with spaces between: human_eval, held_out, or NAME=FILE of alpaca, gsm8k, math500, mt_bench, "
        "speed_bench, each in its public layout (%(default)s)",
    )
    serve.add_argument("--batch-sizes", type=_numbers, default=(1, 8, 16), help="requests at a time (1,8,16)")
    serve.add_argument(
        "--num-prompts", type=int, default=16, help="of each set, evenly spaced; 0 takes all (%(default)s)"
    )
    serve.add_argument("--max-new-tokens", type=int, default=128, help="of each answer (%(default)s)")
    serve.add_argument("--chain-length", type=int, default=3, help="drafts of a round, no tree (%(default)s)")
    serve.add_argument("--dtype", default="", help="of the server, bfloat16 or float32 (default: evaluate.dtype)")


def _add_simulate(commands: argparse._SubParsersAction) -> None:
    text = "time, bytes and the bound of each stage on a cluster that a YAML file describes (docs/simulate.md)"
    simulate = _add(commands, "simulate", run.simulate, text)
    simulate.add_argument("cluster", nargs="?", type=Path, metavar="CLUSTER.yaml", help="the description")
    simulate.add_argument("--target", default="", help="shape of a preset below conf/target (default: the file's)")
    simulate.add_argument("--conversations", type=int, help="number of conversations (default: the file's)")
    simulate.add_argument("--mean-tokens", type=float, help="of a conversation (default: the file's)")
    known = "instead of a cluster: reports folders of smaller runs of one machine, to predict the run of --against from"
    simulate.add_argument("--runs", nargs="+", type=Path, default=(), metavar="REPORTS", help=known)
    simulate.add_argument("--against", type=Path, metavar="REPORTS", help="reports folder of the run that is predicted")


def _add_exchange(commands: argparse._SubParsersAction) -> None:
    layouts = "speculators_v1, speculators or specforge"
    leave = _add(commands, "export-states", run.export_states, "write the hidden states in another project's layout")
    leave.add_argument("--format", required=True, help=layouts)
    leave.add_argument("--to", type=Path, required=True, help="an empty folder, or an export that was interrupted")
    leave.add_argument(
        "--from", dest="source", type=Path, default=Path("data"), help="of the set: data, or imports/NAME"
    )
    leave.add_argument("--trainer-version", default="", help="of the project that will read it, for example 0.4.0")
    enter = _add(
        commands, "import-states", run.import_states, "bring another project's hidden states into a set of ours"
    )
    enter.add_argument("--format", required=True, help=layouts)
    enter.add_argument("--from", dest="source", type=Path, required=True, help="the folder with the files")
    enter.add_argument("--to", type=Path, required=True, help="tokens/, hidden_states/ and its manifest go here")
    _add_import_options(enter)


def _add_drafters(commands: argparse._SubParsersAction) -> None:
    text = "read an export as its servers would, and name every key and tensor that is not the checkpoint's"
    check = _add(commands, "check-export", run.check_export, text)
    check.add_argument(
        "folder", nargs="?", type=Path, default=Path("models/export"), help="the export (default: %(default)s)"
    )
    check.add_argument(
        "--drafter", type=Path, default=Path("models/drafter"), help="the checkpoint (default: %(default)s)"
    )
    text = "a public EAGLE-3 checkpoint of the target, SGLang's or speculators' form, as ours and for every server"
    enter = _add(commands, "import-drafter", run.import_drafter, text)
    enter.add_argument("--from", dest="source", type=Path, required=True, help="the checkpoint's folder")
    enter.add_argument("--to", type=Path, required=True, help="drafter/, draft_vocab/ and export/ go here")


def _add_import_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--boundaries", type=_boundaries, default=(), help="states entering these layers: 2,15,27")
    command.add_argument("--final-hidden", choices=("pre_norm", "post_norm"), help="where the files cannot tell")
    command.add_argument(
        "--max-failed", type=int, default=0, help="bad files that may be left out (default: %(default)s)"
    )


def _add_generations(commands: argparse._SubParsersAction) -> None:
    adopt = _add(
        commands, "adopt", run.adopt, "bring another program's folder under DVC: hashed once, linked, never copied"
    )
    adopt.add_argument("--dir", type=Path, required=True, help="the folder; its bytes are only read")
    adopt.add_argument("--engine", required=True, help="that captured the states, for the record: vllm")
    adopt.add_argument("--format", default="", help="speculators_v1, speculators, specforge, or other (default: found)")
    adopt.add_argument("--note", default="", help="kept with the generation")
    adopt.add_argument("--name", default="", help="of the generation (default: the folder's)")
    which = "first digits of a hash, or an adopted generation's name"
    train = _add(commands, "train-from", run.train_from, "a drafter from an adopted or imported generation, by DVC")
    train.add_argument("generation", metavar="GEN", help=f"{which}, or a folder's name below imports/")
    _add_import_options(train)
    vocab = _add(commands, "draft-vocab", run.draft_vocab, "the draft vocab of an imported set's tokens")
    vocab.add_argument("tokens", type=Path, metavar="TOKENS", help="folder of the tokens")
    vocab.add_argument("out", type=Path, metavar="DRAFT_VOCAB", help="folder to write")
    retire = _add(commands, "retire", run.retire, "take a generation's name out of the workspace; deletes nothing")
    retire.add_argument("generation", metavar="GEN", help=which)
    keep = _add(commands, "keep", run.keep, "pin a generation against gc by a git tag")
    keep.add_argument("generation", metavar="GEN", help=which)
    keep.add_argument("name", metavar="NAME", help="the tag will be keep/NAME")


def _boundaries(text: str) -> tuple[int, ...]:
    """Numbers with commas between."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}, expected layer numbers like 2,15,27") from None


def _numbers(text: str) -> tuple[int, ...]:
    """Numbers with commas between."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}, expected numbers like 1,8,16") from None


def _add(commands: argparse._SubParsersAction, name: str, run: object, text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)
    return parser


if __name__ == "__main__":
    main()
