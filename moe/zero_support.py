"""Zero support: which of DeepSpeed's settings go with experts and with this project's checkpoints.

It stands ahead of `moe/zero.py`. What `check_settings` refuses gives other gradients without a word, stops
late or with a text that does not say what to change, is ignored where it promises something, or leaves state
that a checkpoint cannot hold. What it lets through of the settings that bear on gradients was run, most of
it at world 4 with EP 2, and had the gradients of one process; a test repeats the main ones. All of it was
seen or read in DeepSpeed 0.19. Plain data: no deepspeed here.
"""

import json
from collections.abc import Mapping
from typing import Any

from moe.zero_rules import RULES, Facts


def check_settings(settings: Mapping[str, Any], *, world_size: int, ep_size: int, dtype: str) -> None:
    """Raise ValueError where DeepSpeed's settings do not go with experts, or could not be saved.

    settings: DeepSpeed's JSON as a dict, merged: no "auto" left.   world_size, ep_size: ranks in all, and
    ranks that share one set of experts.   dtype: "float32" or "bfloat16", of the model.
    The message names the setting, its value, the stage, the reason and the nearest that works; of several
    problems all are told, a line each.
    """
    facts = Facts(settings=settings, world_size=world_size, ep_size=ep_size, dtype=dtype)
    _check_form(facts)
    problems = [problem for rule in RULES if (problem := rule.problem(facts)) is not None]
    if problems:
        raise ValueError("\n".join(problems))


def _check_form(facts: Facts) -> None:
    """The form that all rules rely on."""
    if facts.dtype not in ("float32", "bfloat16"):
        raise ValueError(f'dtype {facts.dtype!r} is not trained in; use "float32" or "bfloat16"')
    zero = facts.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        raise ValueError(f'zero_optimization = {json.dumps(zero)} must be an object, such as {{"stage": 1}}')
    if isinstance(facts.stage, bool) or facts.stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_optimization.stage = {json.dumps(facts.stage)} must be 0, 1, 2 or 3")
    for name in ("offload_optimizer", "offload_param"):
        table = zero.get(name)
        if table is not None and not isinstance(table, Mapping):
            raise ValueError(
                f"zero_optimization.{name} = {json.dumps(table)} must be an object, such as "
                '{"device": "cpu"}; or take it out'
            )
