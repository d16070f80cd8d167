"""Deletes checkpoints that no rule keeps.

Each rule by itself keeps; adding one never deletes more. Whatever the rules say, the newest complete checkpoint stays,
and so does what is pinned, claimed, linked to, being saved again, or could not be looked at. See --dry-run first.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Annotated, Any

import typer

from snapctl.cli.exit_codes import ExitCode, worst
from snapctl.cli.options import JsonOption, StorageOptions, parse_storage_options
from snapctl.cli.output import Output
from snapctl.cli.prune_output import Counter, prune_json, say_result, show_plan, would_be
from snapctl.errors import InvalidOptionError, RefusedError, SnapctlError, StorageError
from snapctl.markers import parse_time
from snapctl.pruning.below import prepare_below, prepare_planned
from snapctl.pruning.plan_file import read_plan, write_plan
from snapctl.pruning.policy import Policy, PolicyTerms, make_policy, parse_delete_limit, read_policy
from snapctl.pruning.pruner import (
    Prepared,
    Pruned,
    carry_out,
    nothing_could_be_done,
    prepare,
    prepare_from_lines,
)

_RULES = "Rules"
_LIMITS = "Limits and guards"


class OrderName(str, Enum):
    """By what counting and calendar rules go."""

    BOTH = "both"
    STEP = "step"
    TIME = "time"


def _rule(metavar: str, text: str, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=text, rich_help_panel=_RULES)


def command(
    context: typer.Context,
    save_dirs: Annotated[
        list[str], typer.Argument(metavar="SAVE_DIR...", help="Directories that hold checkpoints: paths or URLs.")
    ],
    recursive: Annotated[
        bool,
        typer.Option("--recursive", "-r", help="Every save directory below these: with --policy, and a plan first."),
    ] = False,
    keep_last: Annotated[list[int] | None, _rule("N", "Keep the newest N.", "--keep-last")] = None,
    keep_every: Annotated[
        list[str] | None,
        _rule("K[:UNTIL]", "Keep the steps that are multiples of K, up to UNTIL. Repeatable.", "--keep-every"),
    ] = None,
    keep_within: Annotated[
        list[str] | None, _rule("DURATION", "Keep what was written so long before the newest.", "--keep-within")
    ] = None,
    keep_hourly: Annotated[list[int] | None, _rule("N", "Keep the newest of each of N hours.", "--keep-hourly")] = None,
    keep_daily: Annotated[list[int] | None, _rule("N", "The same of N days (UTC).", "--keep-daily")] = None,
    keep_weekly: Annotated[list[int] | None, _rule("N", "The same of N weeks (ISO).", "--keep-weekly")] = None,
    keep_monthly: Annotated[list[int] | None, _rule("N", "The same of N months.", "--keep-monthly")] = None,
    keep_yearly: Annotated[list[int] | None, _rule("N", "The same of N years.", "--keep-yearly")] = None,
    keep_best: Annotated[
        list[str] | None,
        _rule("[P/]METRIC:max|min:N", "Keep the N best by a metric of partition P. Repeatable.", "--keep-best"),
    ] = None,
    keep_step: Annotated[list[int] | None, _rule("N", "Keep step N. Repeatable.", "--keep-step")] = None,
    keep_unevaluated: Annotated[
        list[str] | None, _rule("P", "Keep what partition P has not marked yet. Repeatable.", "--keep-unevaluated")
    ] = None,
    keep_unscored: Annotated[
        bool, _rule("", "Keep what has no finite value of a metric of --keep-best.", "--keep-unscored")
    ] = False,
    policy_file: Annotated[
        str | None, _rule("FILE.toml", "Take rules and limits from a file, under the same names.", "--policy")
    ] = None,
    order: Annotated[
        OrderName | None,
        typer.Option(help="Judge by step, by time, or keep what either keeps (both, the default)."),
    ] = None,
    strict_order: Annotated[bool, typer.Option("--strict-order", help="Refuse when steps and times disagree.")] = False,
    verified: Annotated[
        bool, typer.Option("--verified", help="Count only checkpoints whose blobs are all there in full length.")
    ] = False,
    incomplete_older_than: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Delete what dead saves left, too, when it is unchanged for so long."),
    ] = None,
    max_delete: Annotated[
        str | None, typer.Option(metavar="N|P%", help="Refuse to delete more, in each save directory.")
    ] = None,
    allow_unmatched: Annotated[
        bool, typer.Option("--allow-unmatched", help="Warn of a rule that keeps nothing, instead of refusing.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Show what would be done, and end.")] = False,
    now: Annotated[
        str | None, typer.Option(metavar="TIME", help="Rehearse as if it were that time (RFC 3339); with --dry-run.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    plan_file: Annotated[
        str | None, typer.Option("--plan", metavar="FILE", help="Write the plan; without --yes nothing is deleted.")
    ] = None,
    apply_file: Annotated[str | None, typer.Option("--apply", metavar="FILE", help="Carry out such a plan.")] = None,
    storage_option: StorageOptions = None,
    as_json: JsonOption = False,
) -> int:
    out: Output = context.obj
    options = parse_storage_options(storage_option)
    terms = PolicyTerms(
        keep_last=tuple(keep_last or ()),
        keep_every=tuple(keep_every or ()),
        keep_within=tuple(keep_within or ()),
        keep_hourly=tuple(keep_hourly or ()),
        keep_daily=tuple(keep_daily or ()),
        keep_weekly=tuple(keep_weekly or ()),
        keep_monthly=tuple(keep_monthly or ()),
        keep_yearly=tuple(keep_yearly or ()),
        keep_best=tuple(keep_best or ()),
        keep_step=tuple(keep_step or ()),
        keep_unevaluated=tuple(keep_unevaluated or ()),
        keep_unscored=keep_unscored or None,
        order=None if order is None else order.value,
        strict_order=strict_order or None,
        verified=verified or None,
        incomplete_older_than=incomplete_older_than,
        max_delete=max_delete,
        allow_unmatched=allow_unmatched or None,
    )
    pretended = None if now is None else _parse_now(now, dry_run=dry_run)
    stops_at_plan = dry_run or (plan_file is not None and not yes)
    failures: Sequence[SnapctlError] = ()
    if recursive:
        _check_recursive(
            has_policy=policy_file is not None, stops_at_plan=stops_at_plan, applies=apply_file is not None
        )
    if apply_file is not None:
        if terms != PolicyTerms(max_delete=max_delete) or policy_file or plan_file or now:
            raise InvalidOptionError(
                "--apply carries out a plan as it stands: no rules, only --max-delete, --dry-run and --yes go with it"
            )
        limit = None if max_delete is None else parse_delete_limit(max_delete)
        lines = read_plan(apply_file)
        if recursive:
            prepared, failures = prepare_planned(save_dirs, lines, options, max_delete=limit, dry_run=dry_run)
        else:
            prepared = prepare_from_lines(save_dirs, lines, options, max_delete=limit, dry_run=dry_run)
    else:
        policy = _policy(terms, policy_file)
        with out.progress("looking at checkpoints", None, unit="looked at") as show:
            on_look = Counter(show).add
            if recursive:
                prepared, failures = prepare_below(save_dirs, policy, options, now=pretended, on_look=on_look)
            else:
                prepared = prepare(save_dirs, policy, options, dry_run=stops_at_plan, now=pretended, on_look=on_look)
    if plan_file is not None:
        write_plan(plan_file, [(p.plan, p.policy) for p in prepared])
    for failure in failures:
        out.warn(f"could not be looked at: {failure.message}")
    run = _Run(out, prepared, dry_run=stops_at_plan, yes=yes, with_name=recursive or len(prepared) > 1)
    return worst(ExitCode(run.run()), ExitCode.PARTIAL if failures else ExitCode.OK)


def _check_recursive(*, has_policy: bool, stops_at_plan: bool, applies: bool) -> None:
    """What nobody has named is deleted only by rules that stand in a file, and by a plan that somebody has seen."""
    if applies:
        return
    if not has_policy:
        raise RefusedError(
            "--recursive prunes save directories that nobody has named: only by the rules of a file",
            hint="--policy FILE.toml, and --dry-run or --plan FILE first",
        )
    if not stops_at_plan:
        raise RefusedError(
            "--recursive prunes save directories that nobody has named: only by a plan that was made before",
            hint="--plan FILE writes one, without --yes; --recursive ROOT --apply FILE carries it out",
        )


def _policy(terms: PolicyTerms, policy_file: str | None) -> Policy:
    policy = make_policy(terms.over(read_policy(policy_file)) if policy_file is not None else terms)
    if not policy.has_rules:
        raise RefusedError(
            "no rule says what to keep, and everything else would be deleted",
            hint="for example --keep-last 3; to remove only dead saves: --keep-every 1 --incomplete-older-than 1d",
        )
    return policy


def _parse_now(text: str, *, dry_run: bool) -> float:
    if not dry_run:
        raise InvalidOptionError("--now is for rehearsals: it goes with --dry-run")
    try:
        found = parse_time(text if len(text) > 10 else f"{text}T00:00:00Z")
    except ValueError:
        found = None
    if found is None:
        raise InvalidOptionError(f"--now takes a time such as 2026-11-30T12:00:00Z, not {text!r}")
    return found


class _Run:
    """Shows plans, asks, and carries them out."""

    def __init__(self, out: Output, prepared: Sequence[Prepared], *, dry_run: bool, yes: bool, with_name: bool) -> None:
        self._out = out
        self._prepared = prepared
        self._dry_run = dry_run
        self._yes = yes
        self._with_name = with_name
        self._results = [Pruned(each) for each in prepared]

    def run(self) -> int:
        for each in self._prepared:
            if not self._out.as_json:
                show_plan(self._out, each, with_name=self._with_name)
        if self._dry_run:
            return self._finish()
        try:
            self._ask()
        except RefusedError:
            self._print_documents()
            raise
        self._carry_out()
        return self._finish()

    def _ask(self) -> None:
        going = [row for each in self._allowed for row in each.prepared.plan.deletions]
        if going and not self._yes:
            question = would_be(going, verb="delete")
            if not self._out.confirm(f"{question}?"):
                raise RefusedError("nothing was deleted: the answer was no")

    @property
    def _allowed(self) -> list[Pruned]:
        return [result for result in self._results if not result.prepared.plan.refusals]

    def _carry_out(self) -> None:
        rows = [row for result in self._allowed for row in result.prepared.plan.deletions]
        total = sum(row.subject.contents.files for row in rows if row.subject.contents is not None)
        try:
            with self._out.progress("deleting", total, unit="files") as show:
                counter = Counter(show)
                for result in self._allowed:
                    carry_out(result.prepared, on_deleted=counter.add, into=result)
        except BaseException:
            deleted = sum(result.deleted for result in self._results)
            self._out.note(f"interrupted: {deleted} of {len(rows)} checkpoints were deleted; the next prune goes on")
            raise

    def _print_documents(self) -> None:
        if self._out.as_json:
            for result in self._results:
                self._out.document(prune_json(result, dry_run=self._dry_run))

    def _finish(self) -> int:
        if self._out.as_json:
            self._print_documents()
        else:
            for result in self._results:
                say_result(self._out, result, dry_run=self._dry_run, with_name=self._with_name)
        if nothing_could_be_done(self._results):
            raise StorageError(next(outcome.message or "" for result in self._results for outcome in result.failed))
        refused = [message for each in self._prepared for message in each.plan.refusals]
        if refused:
            raise RefusedError("; ".join(refused), hint=_hint(refused))
        return worst(*(_code(result) for result in self._results))


def _hint(refusals: Sequence[str]) -> str | None:
    if any("keeps nothing" in message or "--verified" in message for message in refusals):
        return "if that is meant: --allow-unmatched"
    return None


def _code(result: Pruned) -> ExitCode:
    if result.prepared.left_by_plan_file or result.left_of_plan_file:
        return ExitCode.REFUSED
    if result.failed or result.prepared.plan.not_looked_at:
        return ExitCode.PARTIAL
    return ExitCode.OK
