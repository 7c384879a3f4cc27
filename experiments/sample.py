"""Sample: continue a prompt with the trained model of a run, in one process, experts included."""

import argparse
import codecs
import sys
from collections.abc import Iterator, Sequence

import torch
from safetensors.torch import load_file

from experiments import checkpoint, rundir
from experiments.config import Config, load_config
from moe.model import Transformer


def main(argv: Sequence[str]) -> int:
    """`counterpoise sample RUN`: print the prompt and its continuation."""
    args = parser().parse_args(argv)
    run = rundir.find(args.runs_dir, args.run)
    config = load_config(run.config)
    found = checkpoint.latest(run, say=lambda text: print(text, file=sys.stderr))
    if found is None:
        raise ValueError(f"{run.path} has no complete checkpoint yet")
    model = load_model(config, found)
    prompt = prompt_tokens(args.prompt, config)
    generator = torch.Generator().manual_seed(args.seed)
    text = continue_prompt(model, prompt, args.tokens, args.temperature, args.top_p, generator)
    if config.data.vocab_size == 256:
        print(args.prompt, end="", flush=True)
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in text:
            print(decoder.decode(bytes([token])), end="", flush=True)
        print(decoder.decode(b"", final=True))
    else:
        for token in [*prompt, *text]:
            print(token, end=" ", flush=True)
        print()
    return 0


def parser() -> argparse.ArgumentParser:
    """The arguments of `counterpoise sample`."""
    top = argparse.ArgumentParser(
        prog="counterpoise sample",
        description="Continue a prompt with the model of a run.",
        allow_abbrev=False,
    )
    add = top.add_argument
    add("run", metavar="RUN", help="name of the run, or its folder")
    add("--runs-dir", metavar="DIR", default="runs", help="where run directories are (default: runs)")
    add("--prompt", default="import ", help='text to continue; token ids ("17 4 9") for a token model')
    add("--tokens", metavar="N", type=int, default=400, help="tokens to add (bytes for text); 400")
    add("--temperature", metavar="X", type=float, default=0.8, help="0 takes the likeliest; 0.8")
    add("--top-p", metavar="X", type=float, default=0.95, help="mass of the tokens to draw from; 0.95")
    add("--seed", metavar="N", type=int, default=0, help="seed of the draws; 0")
    return top


def load_model(config: Config, found: checkpoint.Checkpoint) -> Transformer:
    """The whole model of a verified checkpoint, in float32 or as trained.   Raises ValueError if not
    exported."""
    file = found.path / checkpoint.WEIGHTS
    if not file.is_file():
        raise ValueError(
            f"{found.path} has no {checkpoint.WEIGHTS}: the run was made with train.export = false"
        )
    model = Transformer(config.model)
    model.load_state_dict(load_file(file), strict=True)
    return model.eval()


def prompt_tokens(prompt: str, config: Config) -> list[int]:
    """Bytes of the text, or token ids.   Raises ValueError for an empty prompt or an id out of range."""
    vocab = config.data.vocab_size
    if vocab == 256:
        tokens = list(prompt.encode("utf-8", errors="surrogateescape"))
    else:
        try:
            tokens = [int(word) for word in prompt.split()]
        except ValueError as error:
            raise ValueError(
                f"--prompt {prompt!r}: this model takes token ids, for example 17 4 9"
            ) from error
    if not tokens:
        raise ValueError("--prompt is empty; give at least one token")
    if not all(0 <= token < vocab for token in tokens):
        raise ValueError(f"--prompt has token {max(tokens)}, out of 0..{vocab - 1}")
    return tokens


@torch.no_grad()
def continue_prompt(
    model: Transformer,
    prompt: list[int],
    num_tokens: int,
    temperature: float,
    top_p: float,
    generator: torch.Generator,
) -> Iterator[int]:
    """Yield num_tokens tokens, each drawn after the last seq_len tokens before it (nucleus sampling).

    temperature: 0 = the likeliest;  top_p: in (0, 1], mass of the likeliest tokens that may be drawn.
    """
    if temperature < 0 or not 0 < top_p <= 1 or num_tokens < 0:
        raise ValueError(
            f"temperature={temperature} must be 0 or more, top_p={top_p} in (0, 1], "
            f"tokens={num_tokens} 0 or more"
        )
    context = list(prompt)
    for _ in range(num_tokens):
        window = torch.tensor([context[-model.config.seq_len :]])
        logits_V = model(window)[0, -1].float()  # type: ignore[index]
        token = _draw(logits_V, temperature, top_p, generator)
        context.append(token)
        yield token


def _draw(logits_V: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    probs_V, order_V = (logits_V / temperature).softmax(0).sort(descending=True)
    probs_V[probs_V.cumsum(0) - probs_V > top_p] = 0  # the first token stays in any case
    return int(order_V[torch.multinomial(probs_V, 1, generator=generator)])
