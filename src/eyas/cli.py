"""The command ``eyas``: what is not a stage. Results go to stdout, progress and errors to stderr.

Each command imports its room when it runs, so that ``--help``, ``params`` and ``doctor`` need no torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from eyas import console
from eyas.canonical import canonical_json


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command; a user's mistake ends with exit code 2, a found difference with 1."""
    arguments = _parser().parse_args(argv)
    with console.user_errors():
        sys.exit(arguments.run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eyas", description="Capture a target's hidden states and train an EAGLE-3 drafter. `make` lists the rest."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    params = _add(commands, "params", _params, "compose presets of conf/ into params.yaml")
    params.add_argument(
        "choices",
        nargs="*",
        metavar="GROUP=PRESET",
        help="TARGET, DATA, MACHINE or DRAFTER, and a file below conf/GROUP; a group left out takes its default",
    )
    _add(commands, "doctor", _doctor, "what this machine has, lacks and what to do about it")
    _add(commands, "sglang-command", _sglang_command, "how to start an SGLang server that an extraction can attach to")
    _add(commands, "budget", _budget, "whether the planned capture fits this volume, and what would make it fit")
    guard = _add(commands, "guard", _guard, "look at the hidden states before a command of DVC's could wipe them")
    guard.add_argument("--force", action="store_true", help="go on although finished states would be deleted")
    guard.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="COMMAND", help="then run this, for example dvc repro train"
    )
    _add(commands, "settle", _settle, "remove what an extraction kept beside its published states, once DVC has them")
    verify = _add(commands, "verify", _verify, "read every artifact again; states also against tokens and target")
    verify.add_argument("--share", type=float, default=1.0, help="read this share of the shards (default: all)")
    verify.add_argument("--max-mb-per-s", type=float, default=0.0, help="read no faster (default: no limit)")
    _add(commands, "repair", _repair, "restore damaged shards from DVC's cache, or capture their samples again")
    plan = _add(commands, "gc-plan", _gc_plan, "what nobody needs any more, and what deleting it would free")
    plan.add_argument("--projects", help="other projects that share DVC's cache: '/path /path', or none")
    gc = _add(commands, "gc", _gc, "delete what a plan of gc-plan lists, and go on with a gc that was interrupted")
    gc.add_argument("--confirm", default="", metavar="ID", help="the plan's id")
    _add(commands, "summary", _summary, "the last results in one table")
    listed = _add(commands, "generations", _generations, "every version of the hidden states, and what gc would free")
    listed.add_argument("--all", action="store_true", help="also those that only commits name, and deleted ones")
    _add_exchange(commands)
    _add_generations(commands)
    _add_bench(commands)
    smoke = _add(commands, "smoke", _smoke, "run the whole pipeline at small size in a scratch copy")
    smoke.add_argument("--folder", type=Path, default=Path(".eyas/smoke"), help="the copy (default: %(default)s)")
    reproduce = _add(commands, "reproduce", _reproduce, "run small twice from nothing and compare every hash")
    reproduce.add_argument(
        "--folder", type=Path, default=Path(".eyas/reproduce"), help="holds both copies (default: %(default)s)"
    )
    pivot = _add(
        commands, "scenario-pivot", _scenario_pivot, "from one engine to another on a volume that does not hold both"
    )
    pivot.add_argument("--from", dest="first", default="fake", help="engine whose states are in the way (%(default)s)")
    pivot.add_argument("--to", dest="second", default="hf", help="engine that is wanted (%(default)s)")
    return parser


def _add_bench(commands: argparse._SubParsersAction) -> None:
    bench = _add(
        commands, "bench", _bench, "measure store and trainer on the extracted states; writes reports/bench/NAME.json"
    )
    bench.add_argument(
        "name",
        choices=("store", "crash", "corruption", "faults", "gc", "train", "train-quality"),
        help="bytes and speeds (3 minutes), 200 kills (2 to 4), damage and who finds it (2); the states are only read. "
        "faults: a real SGLang made to fail in nine ways (5). gc: promised and measured bytes, a plan over 80,000 objects (1). train: speed, memory and loss beside other "
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
    bench.add_argument("--seeds", type=int, default=3, help="of train-quality: drafters of each trainer (%(default)s)")
    bench.add_argument("--jobs", type=int, default=1, help="of train-quality: peers side by side (%(default)s)")


def _add_exchange(commands: argparse._SubParsersAction) -> None:
    layouts = "speculators_v1, speculators or specforge"
    leave = _add(commands, "export-states", _export_states, "write the hidden states in another project's layout")
    leave.add_argument("--format", required=True, help=layouts)
    leave.add_argument("--to", type=Path, required=True, help="an empty folder, or an export that was interrupted")
    leave.add_argument(
        "--from", dest="source", type=Path, default=Path("data"), help="of the set: data, or imports/NAME"
    )
    leave.add_argument("--trainer-version", default="", help="of the project that will read it, for example 0.4.0")
    enter = _add(commands, "import-states", _import_states, "bring another project's hidden states into a set of ours")
    enter.add_argument("--format", required=True, help=layouts)
    enter.add_argument("--from", dest="source", type=Path, required=True, help="the folder with the files")
    enter.add_argument("--to", type=Path, required=True, help="tokens/, hidden_states/ and its manifest go here")
    _add_import_options(enter)


def _add_import_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--boundaries", type=_boundaries, default=(), help="states entering these layers: 2,15,27")
    command.add_argument("--final-hidden", choices=("pre_norm", "post_norm"), help="where the files cannot tell")
    command.add_argument(
        "--max-failed", type=int, default=0, help="bad files that may be left out (default: %(default)s)"
    )


def _add_generations(commands: argparse._SubParsersAction) -> None:
    adopt = _add(
        commands, "adopt", _adopt, "bring another program's folder under DVC: hashed once, linked, never copied"
    )
    adopt.add_argument("--dir", type=Path, required=True, help="the folder; its bytes are only read")
    adopt.add_argument("--engine", required=True, help="that captured the states, for the record: vllm")
    adopt.add_argument("--format", default="", help="speculators_v1, speculators, specforge, or other (default: found)")
    adopt.add_argument("--note", default="", help="kept with the generation")
    adopt.add_argument("--name", default="", help="of the generation (default: the folder's)")
    which = "first digits of a hash, or an adopted generation's name"
    train = _add(commands, "train-from", _train_from, "a drafter from an adopted or imported generation, by DVC")
    train.add_argument("generation", metavar="GEN", help=f"{which}, or a folder's name below imports/")
    _add_import_options(train)
    vocab = _add(commands, "draft-vocab", _draft_vocab, "the draft vocab of an imported set's tokens")
    vocab.add_argument("tokens", type=Path, metavar="TOKENS", help="folder of the tokens")
    vocab.add_argument("out", type=Path, metavar="DRAFT_VOCAB", help="folder to write")
    retire = _add(commands, "retire", _retire, "take a generation's name out of the workspace; deletes nothing")
    retire.add_argument("generation", metavar="GEN", help=which)
    keep = _add(commands, "keep", _keep, "pin a generation against gc by a git tag")
    keep.add_argument("generation", metavar="GEN", help=which)
    keep.add_argument("name", metavar="NAME", help="the tag will be keep/NAME")


def _boundaries(text: str) -> tuple[int, ...]:
    """Numbers with commas between."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}, expected layer numbers like 2,15,27") from None


def _add(commands: argparse._SubParsersAction, name: str, run: object, text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)
    return parser


def _params(arguments: argparse.Namespace) -> int:
    from eyas.ops.params import write_params

    changes = write_params(Path(), arguments.choices)
    if arguments.json:
        console.emit(canonical_json({change.key: [change.old, change.new] for change in changes}))
    elif changes:
        console.emit(console.table([(c.key, c.old, c.new) for c in changes], ("params.yaml", "before", "now")))
    else:
        console.emit("params.yaml: unchanged")
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from eyas.ops.doctor import examine

    findings = examine(Path())
    if arguments.json:
        console.emit(canonical_json(findings))
    else:
        console.emit(console.table([(f.name, f.state, f.value) for f in findings]))
        for finding in findings:
            if finding.hint:
                console.emit(f"\nhint: {finding.name}: {finding.hint}")
    return 1 if any(finding.state == "problem" for finding in findings) else 0


def _sglang_command(arguments: argparse.Namespace) -> int:
    from eyas.ops.sglang_command import sglang_command

    text = sglang_command(Path())
    console.emit(canonical_json({"command": text}) if arguments.json else text)
    return 0


def _budget(arguments: argparse.Namespace) -> int:
    from eyas.ops.budget import examine
    from eyas.ops.budget_text import account_text, account_values

    account = examine(Path())
    console.emit(canonical_json(account_values(account)) if arguments.json else account_text(account))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from eyas.ops.verify import verified_text, verify_all
    from eyas.ops.verify_states import make_extent

    verified = verify_all(Path(), make_extent(arguments.share, arguments.max_mb_per_s))
    console.emit(canonical_json(verified) if arguments.json else verified_text(verified))
    return 1 if verified.is_damaged else 0


def _repair(arguments: argparse.Namespace) -> int:
    from eyas.ops.repair import repair

    done = repair(Path())
    rows = [(r.shard, r.how, r.num_captured_samples, "as before" if r.is_same else r.md5) for r in done]
    if arguments.json:
        console.emit(canonical_json(done))
    else:
        console.emit(console.table(rows, ("shard", "", "samples captured", "md5")) if rows else "nothing to repair")
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    from eyas.ops.bench.run import run, table

    options = {
        "train": {"peers": arguments.peers, "num_rounds": arguments.rounds, "device": arguments.device},
        "train-quality": {"peers": arguments.peers, "num_seeds": arguments.seeds, "jobs": arguments.jobs},
    }
    figures = run(Path(), arguments.name, **options.get(arguments.name, {}))
    console.emit(canonical_json(figures) if arguments.json else table(arguments.name, figures))
    return 0


def _guard(arguments: argparse.Namespace) -> int:
    from eyas.ops.guard import run

    return run(Path(), arguments.command, force=arguments.force)


def _settle(arguments: argparse.Namespace) -> int:
    from eyas.ops.guard import settle

    identities = settle(Path())
    if arguments.json:
        console.emit(canonical_json(identities))
    else:
        console.emit("\n".join(f"settled: {identity}" for identity in identities) or "nothing to settle")
    return 0


def _gc_plan(arguments: argparse.Namespace) -> int:
    from eyas.ops.gc.intent import write_plan
    from eyas.ops.gc.plan import make_plan, parse_projects
    from eyas.ops.gc.text import plan_text, plan_values

    plan = make_plan(Path(), parse_projects(arguments.projects))
    if plan.plan_id:
        write_plan(Path(), plan.plan_id, plan.projects, plan.snapshot)
    console.emit(canonical_json(plan_values(plan)) if arguments.json else plan_text(plan))
    return 1 if plan.refusals else 0


def _gc(arguments: argparse.Namespace) -> int:
    from eyas.ops.gc.collect import collect, outcome_text

    event = collect(Path(), arguments.confirm)
    console.emit(canonical_json(event) if arguments.json else outcome_text(event))
    return 0


def _summary(arguments: argparse.Namespace) -> int:
    from eyas.report.summary import summary_text, summary_values

    console.emit(canonical_json(summary_values(Path())) if arguments.json else summary_text(Path()))
    return 0


def _generations(arguments: argparse.Namespace) -> int:
    from eyas.ops.generations import as_json, as_text, list_all

    listing = list_all(Path(), everything=arguments.all)
    console.emit(canonical_json(as_json(listing)) if arguments.json else as_text(listing))
    return 0


def _export_states(arguments: argparse.Namespace) -> int:
    from eyas.ops.exchange.rows import export_rows
    from eyas.ops.exchange.states import export_states

    result = export_states(Path(), arguments.format, arguments.to, arguments.trainer_version, arguments.source)
    rows = export_rows(result)
    console.emit(canonical_json(dict(rows)) if arguments.json else console.table(rows))
    return 0


def _import_states(arguments: argparse.Namespace) -> int:
    from eyas.ops.exchange.rows import import_rows
    from eyas.ops.exchange.stage import ImportOptions, write_pipeline
    from eyas.ops.exchange.states import ImportRequest, import_states

    options = ImportOptions(
        boundaries=arguments.boundaries, final_hidden=arguments.final_hidden, max_failed=arguments.max_failed
    )
    request = ImportRequest(
        layout=arguments.format,
        source=arguments.source,
        out=arguments.to,
        boundaries=arguments.boundaries,
        final_hidden=arguments.final_hidden,
        max_failed=arguments.max_failed,
    )
    report = import_states(Path(), request)
    write_pipeline(Path(), arguments.format, arguments.source, arguments.to, options)
    console.emit(canonical_json(report) if arguments.json else console.table(import_rows(report)))
    return 0


def _smoke(arguments: argparse.Namespace) -> int:
    from eyas.ops.scratch import run_small
    from eyas.report.summary import summary_text, summary_values

    run_small(Path(), arguments.folder)
    folder = arguments.folder
    console.emit(canonical_json(summary_values(folder)) if arguments.json else summary_text(folder))
    return 0


def _scenario_pivot(arguments: argparse.Namespace) -> int:
    from eyas.ops.scenario.pivot import pivot_rows, run_pivot
    from eyas.ops.scenario.transcript import DeviationError

    try:
        done = run_pivot(Path(), arguments.first, arguments.second)
    except DeviationError as error:
        console.log(f"error: {error}")
        return 1
    console.emit(canonical_json(done) if arguments.json else console.table(pivot_rows(done)))
    return 0


def _reproduce(arguments: argparse.Namespace) -> int:
    from eyas.ops.reproduce import reproduce

    comparisons = reproduce(Path(), arguments.folder)
    equal = all(comparison.equal for comparison in comparisons)
    if arguments.json:
        console.emit(canonical_json(comparisons))
    else:
        rows = [(c.artifact, c.first[:16], c.second[:16], "same" if c.equal else "DIFFERENT") for c in comparisons]
        console.emit(console.table(rows, ("artifact", "first run", "second run", "")))
        console.emit("\nreproduced: every hash is the same" if equal else "\nnot reproduced")
    return 0 if equal else 1


def _adopt(arguments: argparse.Namespace) -> int:
    from eyas.ops.adopt.folder import AdoptRequest, adopt, adopted_rows

    request = AdoptRequest(
        folder=arguments.dir,
        engine=arguments.engine,
        layout=arguments.format,
        note=arguments.note,
        name=arguments.name,
    )
    done = adopt(Path(), request)
    console.emit(canonical_json(done) if arguments.json else console.table(adopted_rows(done)))
    return 0


def _retire(arguments: argparse.Namespace) -> int:
    from eyas.ops.retire import retire, retired_text

    done = retire(Path(), arguments.generation)
    console.emit(canonical_json(done) if arguments.json else retired_text(done))
    return 0


def _train_from(arguments: argparse.Namespace) -> int:
    from eyas.ops.exchange.stage import ImportOptions
    from eyas.ops.exchange.train_from import train_from, trained_rows

    options = ImportOptions(
        boundaries=arguments.boundaries, final_hidden=arguments.final_hidden, max_failed=arguments.max_failed
    )
    done = train_from(Path(), arguments.generation, options)
    console.emit(canonical_json(done) if arguments.json else console.table(trained_rows(done)))
    return 0


def _draft_vocab(arguments: argparse.Namespace) -> int:
    from eyas.ops.exchange.draft_vocab import make_draft_vocab

    vocab, coverage = make_draft_vocab(Path(), arguments.tokens, arguments.out)
    console.emit(f"{len(vocab.d2t_W):,} draft ids, {coverage:.1%} of what the assistant wrote in training")
    return 0


def _keep(arguments: argparse.Namespace) -> int:
    from eyas.ops.retire import keep

    done = keep(Path(), arguments.generation, arguments.name)
    pinned = f"kept: {done.name} ({done.hash[:10]}) by tag {done.tag} on {done.commit[:10]}; git push origin {done.tag}"
    console.emit(canonical_json(done) if arguments.json else pinned)
    return 0


if __name__ == "__main__":
    main()
