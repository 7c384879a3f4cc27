"""The default run, whole: minutes long, so it is marked slow."""

import json

import pytest


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.deepspeed
def test_default_run_beats_the_bigram_model_in_every_domain(counterpoise, tmp_path):
    done = counterpoise("train", cwd=tmp_path, timeout_s=900.0)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = map(json.loads, (tmp_path / "runs" / "tiny-1" / "metrics.jsonl").read_text().splitlines())
    by_kind = {line["kind"]: line for line in lines}  # the last of each kind
    model, bigram = by_kind["valid"]["bits_per_byte"], by_kind["baselines"]["bigram"]
    gains = {name: bigram[name] - bits for name, bits in model.items()}
    assert min(gains.values()) > 0, gains
    assert sum(gains.values()) / len(gains) >= 1.0, gains
