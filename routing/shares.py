"""Shares: the text of `RouterConfig.forced` as a number for every expert.

Plain Python without torch: settings are checked with it before anything heavy is imported.
"""

import math

FORMS = '"" (the router selects), uniform, zipf:A, always:I,J,.., only:A-B, only:I,J,.., share:p0,p1,..'
STEEPEST = 1000.0  # beyond it every token has experts 0..K-1 anyway, and float32 would lose the noise


def log_shares(forced: str, num_experts: int, num_chosen: int) -> list[float]:
    """What is added to the noise of each expert: the logarithm of its share, which need not sum to 1.

    -inf = never chosen, +inf = always.   forced: a form of `FORMS`;  num_experts: E;  num_chosen: K, 1..E.
    Returns E numbers, at least K of them above -inf.   Raises ValueError for an unknown form, for values that
    are no numbers or out of bounds, and where K experts cannot be chosen.
    """
    form, _, text = forced.partition(":")
    if forced == "uniform":
        return [0.0] * num_experts
    if form == "zipf":
        exponent = _number(forced, text, STEEPEST)
        return [-exponent * math.log(expert + 1) for expert in range(num_experts)]
    if form == "share":
        return _explicit(forced, text, num_experts, num_chosen)
    if form == "always":
        chosen = _experts(forced, text, num_experts)
        if len(chosen) > num_chosen:
            raise ValueError(
                f"router.forced={forced!r} names {len(chosen)} experts for every token, more than "
                f"router.top_k={num_chosen}; name {num_chosen} at most, or raise top_k"
            )
        return [math.inf if expert in chosen else 0.0 for expert in range(num_experts)]
    if form == "only":
        chosen = _experts(forced, text, num_experts)
        _check_enough(forced, len(chosen), num_chosen)
        return [0.0 if expert in chosen else -math.inf for expert in range(num_experts)]
    raise ValueError(f"router.forced={forced!r} is unknown; use one of {FORMS}")


def _explicit(forced: str, text: str, num_experts: int, num_chosen: int) -> list[float]:
    shares = [_number(forced, part, math.inf) for part in text.split(",")]
    if len(shares) != num_experts:
        raise ValueError(
            f"router.forced={forced!r} gives {len(shares)} shares, expected {num_experts}: one for each of "
            f"the router.num_experts={num_experts}"
        )
    _check_enough(forced, sum(share > 0 for share in shares), num_chosen)
    return [math.log(share) if share > 0 else -math.inf for share in shares]


def _check_enough(forced: str, num_allowed: int, num_chosen: int) -> None:
    if num_allowed < num_chosen:
        raise ValueError(
            f"router.forced={forced!r} allows {num_allowed} experts, but every token selects "
            f"router.top_k={num_chosen} different ones; allow {num_chosen} or more, or lower top_k"
        )


def _number(forced: str, text: str, bound: float) -> float:
    """A finite number in 0..bound."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= bound or math.isinf(value):
        span = "0 or more, and finite" if math.isinf(bound) else f"in 0..{bound:g}"
        raise ValueError(
            f"router.forced={forced!r}: {text!r} is out of bounds or no number; give a number {span}, "
            "for example zipf:1.0 or share:3,1,1,1"
        )
    return value


def _experts(forced: str, text: str, num_experts: int) -> set[int]:
    """The experts that ids and ranges such as "0-3,6" name, each once."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        ids = [first, last] if dash else [first]
        if not all(number.isascii() and number.isdecimal() for number in ids):
            raise ValueError(
                f"router.forced={forced!r}: {part!r} is no expert and no range of experts; write 3 or 0-3, "
                "with commas in between"
            )
        low, high = int(ids[0]), int(ids[-1])
        if not low <= high < num_experts:
            raise ValueError(
                f"router.forced={forced!r}: {part!r} is no range or out of 0..{num_experts - 1} "
                f"(router.num_experts={num_experts}), low end first"
            )
        twice = found & set(range(low, high + 1))
        if twice:
            raise ValueError(f"router.forced={forced!r} names expert {min(twice)} twice; name it once")
        found |= set(range(low, high + 1))
    return found
