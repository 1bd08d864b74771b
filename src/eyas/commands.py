"""What each command of ``eyas`` does: the room called, its answer printed; returns the exit code.

A room is imported when its command runs, so that ``--help``, ``params`` and ``doctor`` need no torch.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from eyas import console
from eyas.canonical import canonical_json

if TYPE_CHECKING:
    from eyas.ops.remote import Transferred


def params(arguments: argparse.Namespace) -> int:
    from eyas.ops.params import write_params

    changes = write_params(Path(), arguments.choices)
    if arguments.json:
        console.emit(canonical_json({change.key: [change.old, change.new] for change in changes}))
    elif changes:
        console.emit(console.table([(c.key, c.old, c.new) for c in changes], ("params.yaml", "before", "now")))
    else:
        console.emit("params.yaml: unchanged")
    return 0


def changed(arguments: argparse.Namespace) -> int:
    from eyas import config
    from eyas.ops import changed as room

    found = room.changed(Path())
    if arguments.json:
        console.emit(canonical_json(found))
    elif found:
        console.emit(
            console.table([(c.stage, c.key, c.before, c.now) for c in found], ("stage", "parameter", "ran with", "now"))
        )
    config.load(config.PARAMS_PATH)  # a wrong value is told beside the state, which is shown all the same
    return 0


def doctor(arguments: argparse.Namespace) -> int:
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


def sglang_command(arguments: argparse.Namespace) -> int:
    from eyas.ops.sglang_command import sglang_command

    text = sglang_command(Path())
    console.emit(canonical_json({"command": text}) if arguments.json else text)
    return 0


def budget(arguments: argparse.Namespace) -> int:
    from eyas.ops.budget import examine
    from eyas.ops.budget_text import account_text, account_values

    account = examine(Path())
    console.emit(canonical_json(account_values(account)) if arguments.json else account_text(account))
    return 0


def verify(arguments: argparse.Namespace) -> int:
    from eyas.ops.verify import verified_text, verify_all
    from eyas.ops.verify_states import make_extent

    if arguments.remote is not None:
        from eyas.ops.remote import verify_remote

        extent = make_extent(arguments.share, arguments.max_mb_per_s)
        return _transferred(arguments, verify_remote(Path(), arguments.remote, extent.share))
    verified = verify_all(Path(), make_extent(arguments.share, arguments.max_mb_per_s))
    console.emit(canonical_json(verified) if arguments.json else verified_text(verified))
    return 1 if verified.is_damaged else 0


def push(arguments: argparse.Namespace) -> int:
    from eyas.ops import remote

    return _transferred(arguments, remote.push(Path(), arguments.remote))


def pull(arguments: argparse.Namespace) -> int:
    from eyas.ops import remote

    return _transferred(arguments, remote.pull(Path(), arguments.remote))


def _transferred(arguments: argparse.Namespace, done: Transferred) -> int:
    from eyas.ops.remote import transferred_text

    console.emit(canonical_json(done) if arguments.json else transferred_text(done))
    return 1 if done.problems else 0


def train_far(_: argparse.Namespace) -> int:
    from eyas.ops.train_far import train_far

    train_far(Path())
    return 0


def repair(arguments: argparse.Namespace) -> int:
    from eyas.ops.repair import repair

    done = repair(Path())
    rows = [(r.shard, r.how, r.num_captured_samples, "as before" if r.is_same else r.md5) for r in done]
    if arguments.json:
        console.emit(canonical_json(done))
    else:
        console.emit(console.table(rows, ("shard", "", "samples captured", "md5")) if rows else "nothing to repair")
    return 0


def bench(arguments: argparse.Namespace) -> int:
    from eyas.ops.bench.run import run, table

    options = {
        "train": {
            "peers": arguments.peers,
            "num_rounds": arguments.rounds,
            "device": arguments.device,
            "share": arguments.share,
        },
        "train-quality": {"peers": arguments.peers, "num_seeds": arguments.seeds, "jobs": arguments.jobs},
    }
    figures = run(Path(), arguments.name, **options.get(arguments.name, {}))
    console.emit(canonical_json(figures) if arguments.json else table(arguments.name, figures))
    return 0


def guard(arguments: argparse.Namespace) -> int:
    from eyas.ops.guard import run

    return run(Path(), arguments.command, force=arguments.force)


def settle(arguments: argparse.Namespace) -> int:
    from eyas.ops.guard import settle

    identities = settle(Path())
    if arguments.json:
        console.emit(canonical_json(identities))
    else:
        console.emit("\n".join(f"settled: {identity}" for identity in identities) or "nothing to settle")
    return 0


def gc_plan(arguments: argparse.Namespace) -> int:
    from eyas.ops.gc.intent import write_plan
    from eyas.ops.gc.plan import make_plan, parse_projects
    from eyas.ops.gc.text import plan_text, plan_values

    plan = make_plan(Path(), parse_projects(arguments.projects))
    if plan.plan_id:
        write_plan(Path(), plan.plan_id, plan.projects, plan.snapshot)
    console.emit(canonical_json(plan_values(plan)) if arguments.json else plan_text(plan))
    return 1 if plan.refusals else 0


def gc(arguments: argparse.Namespace) -> int:
    from eyas.ops.gc.collect import collect, outcome_text

    event = collect(Path(), arguments.confirm)
    console.emit(canonical_json(event) if arguments.json else outcome_text(event))
    return 0


def summary(arguments: argparse.Namespace) -> int:
    from eyas.report.summary import summary_text, summary_values

    console.emit(canonical_json(summary_values(Path())) if arguments.json else summary_text(Path()))
    return 0


def compare(arguments: argparse.Namespace) -> int:
    from eyas.report.compare import as_text, compare, values
    from eyas.report.revision import find

    if arguments.known:
        find(Path(), arguments.revision)
        return 0
    found = compare(Path(), arguments.revision)
    console.emit(canonical_json(values(found)) if arguments.json else as_text(found))
    return 0


def generations(arguments: argparse.Namespace) -> int:
    from eyas.ops.generations import as_json, as_text, list_all

    listing = list_all(Path(), everything=arguments.all)
    console.emit(canonical_json(as_json(listing)) if arguments.json else as_text(listing))
    return 0


def export_states(arguments: argparse.Namespace) -> int:
    from eyas.ops.exchange.rows import export_rows
    from eyas.ops.exchange.states import export_states

    result = export_states(Path(), arguments.format, arguments.to, arguments.trainer_version, arguments.source)
    rows = export_rows(result)
    console.emit(canonical_json(dict(rows)) if arguments.json else console.table(rows))
    return 0


def import_states(arguments: argparse.Namespace) -> int:
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


def check_export(arguments: argparse.Namespace) -> int:
    from eyas.ops.check_export import check_export, checked_rows

    record = check_export(Path(), arguments.folder, arguments.drafter)
    console.emit(canonical_json(record) if arguments.json else console.table(checked_rows(record)))
    return 0


def import_drafter(arguments: argparse.Namespace) -> int:
    from eyas.ops.import_drafter import import_drafter, imported_rows

    done = import_drafter(Path(), arguments.source, arguments.to)
    console.emit(canonical_json(done) if arguments.json else console.table(imported_rows(done, arguments.to)))
    return 0


def smoke(arguments: argparse.Namespace) -> int:
    from eyas.ops.scratch import run_small
    from eyas.report.summary import summary_text, summary_values

    run_small(Path(), arguments.folder)
    folder = arguments.folder
    console.emit(canonical_json(summary_values(folder)) if arguments.json else summary_text(folder))
    return 0


def scenario_pivot(arguments: argparse.Namespace) -> int:
    from eyas.ops.scenario.pivot import pivot_rows, run_pivot
    from eyas.ops.scenario.transcript import DeviationError

    try:
        done = run_pivot(Path(), arguments.first, arguments.second)
    except DeviationError as error:
        console.log(f"error: {error}")
        return 1
    console.emit(canonical_json(done) if arguments.json else console.table(pivot_rows(done)))
    return 0


def parity(arguments: argparse.Namespace) -> int:
    from eyas.ops.parity import parity_table, run_parity

    figures = run_parity(Path(), arguments.engines.split(","), arguments.samples)
    console.emit(canonical_json(figures) if arguments.json else parity_table(figures))
    return 0 if figures["right"] else 1


def serve_bench(arguments: argparse.Namespace) -> int:
    from eyas.ops.serve.figures import table
    from eyas.ops.serve.run import ServeRequest, serve_bench

    request = ServeRequest(
        sets=tuple(arguments.sets.split()),
        batch_sizes=arguments.batch_sizes,
        num_prompts=arguments.num_prompts,
        max_new_tokens=arguments.max_new_tokens,
        chain_length=arguments.chain_length,
        dtype=arguments.dtype,
    )
    figures = serve_bench(Path(), request)
    console.emit(canonical_json(figures) if arguments.json else table(figures))
    return 0


def reproduce(arguments: argparse.Namespace) -> int:
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


def adopt(arguments: argparse.Namespace) -> int:
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


def retire(arguments: argparse.Namespace) -> int:
    from eyas.ops.retire import retire, retired_text

    done = retire(Path(), arguments.generation)
    console.emit(canonical_json(done) if arguments.json else retired_text(done))
    return 0


def train_from(arguments: argparse.Namespace) -> int:
    from eyas.ops.exchange.stage import ImportOptions
    from eyas.ops.exchange.train_from import train_from, trained_rows

    options = ImportOptions(
        boundaries=arguments.boundaries, final_hidden=arguments.final_hidden, max_failed=arguments.max_failed
    )
    done = train_from(Path(), arguments.generation, options)
    console.emit(canonical_json(done) if arguments.json else console.table(trained_rows(done)))
    return 0


def draft_vocab(arguments: argparse.Namespace) -> int:
    from eyas.ops.exchange.draft_vocab import make_draft_vocab

    vocab, coverage = make_draft_vocab(Path(), arguments.tokens, arguments.out)
    console.emit(f"{len(vocab.d2t_W):,} draft ids, {coverage:.1%} of what the assistant wrote in training")
    return 0


def keep(arguments: argparse.Namespace) -> int:
    from eyas.ops.retire import keep

    done = keep(Path(), arguments.generation, arguments.name)
    pinned = f"kept: {done.name} ({done.hash[:10]}) by tag {done.tag} on {done.commit[:10]}; git push origin {done.tag}"
    console.emit(canonical_json(done) if arguments.json else pinned)
    return 0


def simulate(arguments: argparse.Namespace) -> int:
    from eyas.errors import ConfigError
    from eyas.ops.simulate import text
    from eyas.ops.simulate.description import HINT, read_description
    from eyas.ops.simulate.predict import predict
    from eyas.ops.simulate.runs import judge

    if bool(arguments.cluster) == bool(arguments.runs) or bool(arguments.runs) != bool(arguments.against):
        raise ConfigError("expected a cluster's description, or --runs together with --against", HINT)
    if arguments.runs:
        judged = judge(arguments.runs, arguments.against)
        console.emit(canonical_json(text.judged_json(judged)) if arguments.json else text.judged_text(judged))
        return 0
    given = read_description(arguments.cluster, arguments.target, arguments.conversations, arguments.mean_tokens)
    found = predict(given)
    console.emit(canonical_json(text.as_json(found)) if arguments.json else text.as_text(given, found))
    return 0
