"""What cheap models reach on a domain: the figures that a trained model's bits per token stand beside.

Reads the same arrays as the model (`corpus.Domain.train`, `data.validation_batch`); pure numpy and the
standard library's lzma.
"""

import lzma

import numpy as np

MAX_VOCAB = 4096  # a table of all pairs of tokens takes 8 * 4096**2 bytes = 134 MB
MAX_TRAIN_TOKENS = 5_000_000
MAX_LZMA_BYTES = 512 * 1024
SEGMENTS = 64


def bigram_bits_per_token(train: np.ndarray, valid_windows: np.ndarray, vocab_size: int) -> float:
    """Mean bits per predicted token of an interpolated bigram model fitted on train.

    train: [n] integer tokens, n >= 2 (of more than 5 million, 64 evenly spaced segments are used).
    valid_windows: [n, S + 1] integer tokens, of which [:, 1:] are predicted from [:, :-1]: exactly what the
    model is asked. NaN for vocab_size > 4096, where the table of pairs would not fit. With the counts c(a,
    b) of pairs, T(a) the number of distinct followers of a, and V = vocab_size (Witten-Bell interpolation):

        p(b | a) = (c(a, b) + T(a) p1(b)) / (c(a) + T(a)),   p1(b) = (c(b) + T0 / V) / (n + T0)

    where T0 is the number of distinct tokens, and p(b | a) = p1(b) if a was never seen. ValueError for
    empty or misshaped input and tokens outside 0..vocab_size-1.
    """
    if vocab_size > MAX_VOCAB:
        return float("nan")
    if valid_windows.ndim != 2 or valid_windows.shape[0] < 1 or valid_windows.shape[1] < 2:
        raise ValueError(
            f"valid_windows: expected [n >= 1, S + 1 >= 2] but found {list(valid_windows.shape)}"
        )
    if train.ndim != 1 or len(train) < 2:
        raise ValueError(f"train: expected [n >= 2] but found {list(train.shape)}")
    tokens = _evenly_spaced(train, MAX_TRAIN_TOKENS).astype(np.int64)
    _check_range("train", tokens, vocab_size)
    _check_range("valid_windows", valid_windows, vocab_size)
    windows = valid_windows.astype(np.int64)
    return float(-np.log2(_bigram(tokens, windows[:, :-1], windows[:, 1:], vocab_size)).mean())


def _bigram(tokens: np.ndarray, given: np.ndarray, next_: np.ndarray, vocab_size: int) -> np.ndarray:
    """p(next | given) elementwise, float64, from the pairs of tokens [n]."""
    pairs = np.bincount(tokens[:-1] * vocab_size + tokens[1:], minlength=vocab_size**2)
    pairs = pairs.reshape(vocab_size, vocab_size)
    singles = np.bincount(tokens, minlength=vocab_size)
    num_distinct = np.count_nonzero(singles)
    p_single = (singles + num_distinct / vocab_size) / (len(tokens) + num_distinct)
    num_pairs, num_followers = pairs.sum(axis=1), np.count_nonzero(pairs, axis=1)
    numerator = pairs[given, next_] + num_followers[given] * p_single[next_]
    denominator = (num_pairs + num_followers)[given]
    return np.where(denominator > 0, numerator / np.maximum(denominator, 1), p_single[next_])


def _evenly_spaced(tokens: np.ndarray, limit: int) -> np.ndarray:
    """At most limit tokens, as SEGMENTS evenly spaced pieces where there are more (one wrong pair a seam)."""
    if len(tokens) <= limit:
        return np.asarray(tokens)
    length = limit // SEGMENTS
    starts = np.linspace(0, len(tokens) - length, SEGMENTS).astype(np.int64)
    return np.concatenate([tokens[start : start + length] for start in starts])


def _check_range(name: str, tokens: np.ndarray, vocab_size: int) -> None:
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"{name}: tokens span {low}..{high}, outside 0..{vocab_size - 1}")


def lzma_bits_per_byte(valid: np.ndarray) -> float:
    """Bits per byte of the validation text under lzma (preset 9, extreme), which starts with an empty memory.

    valid: [n] uint8; of more than 512 KiB, 64 evenly spaced segments are compressed. NaN for wider tokens:
    their bytes are no text. ValueError if empty.
    """
    if len(valid) == 0:
        raise ValueError("valid: expected [n >= 1] uint8 but found no bytes")
    if valid.dtype != np.uint8:
        return float("nan")
    text = _evenly_spaced(valid, MAX_LZMA_BYTES).tobytes()
    # the bare stream: a container's check sums would count as text; a dictionary of the text's own size: the
    # preset's 64 MiB one would take 670 MB of memory for the same result
    filters = [{"id": lzma.FILTER_LZMA1, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": MAX_LZMA_BYTES}]
    packed = lzma.compress(text, format=lzma.FORMAT_ALONE, filters=filters)
    return 8 * len(packed) / len(text)
