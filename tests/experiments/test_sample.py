"""Sampling: deterministic by seed, within the window, errors that teach."""

import pytest
import torch

from experiments.config import load_config
from experiments.sample import continue_prompt, parser, prompt_tokens
from moe.model import Transformer

CONFIG = load_config("tiny.toml", ["model.seq_len=8", "model.d_model=32", "model.num_layers=1"])


@pytest.fixture(scope="module")
def model() -> Transformer:
    made = Transformer(CONFIG.model)
    made.init_weights(0)
    return made.eval()


def draw(model, temperature=1.0, top_p=1.0, seed=0, num=12):
    generator = torch.Generator().manual_seed(seed)
    return list(continue_prompt(model, [1, 2, 3], num, temperature, top_p, generator))


def test_same_seed_same_text_and_longer_than_the_window(model):
    assert draw(model) == draw(model)
    assert draw(model) != draw(model, seed=1)
    assert len(draw(model, num=20)) == 20


def test_temperature_zero_and_tiny_nucleus_take_the_likeliest(model):
    assert draw(model, temperature=0.0) == draw(model, temperature=0.0, seed=5)
    assert draw(model, top_p=1e-9) == draw(model, temperature=0.0)


@pytest.mark.parametrize(("temperature", "top_p"), [(-1.0, 1.0), (1.0, 0.0), (1.0, 1.5)])
def test_out_of_range_settings_are_refused(model, temperature, top_p):
    with pytest.raises(ValueError, match=r"temperature=.* must be 0 or more, top_p=.* in \(0, 1\]"):
        draw(model, temperature, top_p)


def test_prompts_become_tokens_or_errors():
    assert prompt_tokens("h\u00e9", CONFIG) == [104, 195, 169]
    with pytest.raises(ValueError, match="--prompt is empty"):
        prompt_tokens("", CONFIG)
    words = load_config("tiny.toml", ["data.paths=tokens.npy", "data.vocab_size=1000"])
    assert prompt_tokens("17 4", words) == [17, 4]
    with pytest.raises(ValueError, match=r"token 1000, out of 0\.\.999"):
        prompt_tokens("1000", words)
    with pytest.raises(ValueError, match="takes token ids"):
        prompt_tokens("hello", words)


def test_help_names_units():
    assert "bytes for text" in parser().format_help()
