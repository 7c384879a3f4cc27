"""The corpora: what is in them, that the split does not leak, and what bad input says."""

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments import builtin
from experiments.builtin import drop_seen
from experiments.corpus import BLOCK, CUT, GAP, TextFile, corpus_hash, plan_split, split_file
from experiments.data import DataConfig, load_corpus

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def corpus():
    return load_corpus(DataConfig(), seq_len=256)


def write_texts(folder, num=40, size=3000, seed=0):
    """Files of random letters: no two windows of 16 bytes are alike."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for index in range(num):
        (folder / f"{index}.txt").write_bytes(rng.integers(97, 123, size, dtype=np.uint8).tobytes())
    return folder


# --- the built-in corpus
# -------------------------------------------------------------------------------------


def test_builtin_corpus_has_four_domains_and_says_what_it_lacks(corpus):
    names = [domain.name for domain in corpus.domains]
    total = sum(domain.train.size + domain.valid.size for domain in corpus.domains)
    assert names == [n for n in ("prose", "python", "c", "names", "tables", "numbers") if n in names]
    assert len(names) >= 4, corpus.notes
    assert total >= 8_000_000, corpus.notes
    assert {domain.name: domain.num_files for domain in corpus.domains}["names"] == 1  # cut, not two
    assert len(names) == 6 or any("left out" in note for note in corpus.notes)
    for domain in corpus.domains:
        assert domain.train.dtype == domain.valid.dtype == np.uint8
        assert 0.01 < domain.valid.size / domain.train.size < 0.15, domain.name


def test_no_validation_window_occurs_in_any_train_part(corpus):
    # 50 windows a domain; a window of fewer than 16 distinct bytes (rules, rows of zeros) is trivially
    # repetitive
    trains = [domain.train.tobytes() for domain in corpus.domains]
    rng = np.random.default_rng(0)
    for domain in corpus.domains:
        text = domain.valid.tobytes()
        checked = 0
        for start in rng.integers(0, len(text) - 200, 50):
            window = text[start : start + 200]
            if len(set(window)) < 16:
                continue
            checked += 1
            assert not any(window in train for train in trains), (domain.name, window)
        assert checked >= 40


LOAD = """
import sys
from experiments.data import DataConfig, load_corpus
corpus = load_corpus(DataConfig())
print(corpus.sha256, [domain.name for domain in corpus.domains])
"""


def test_builtin_corpus_is_the_same_in_other_processes(corpus, tmp_path):
    expected = f"{corpus.sha256} {[domain.name for domain in corpus.domains]}"
    for hash_seed, cwd, locale in (("1", ROOT, "C"), ("77", tmp_path, "C.UTF-8")):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT), "LC_ALL": locale}
        done = subprocess.run(
            [sys.executable, "-c", LOAD], cwd=cwd, env=env, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == expected


def test_builtin_corpus_without_test_suite_and_headers_is_smaller_and_says_so(monkeypatch, tmp_path):
    library = tmp_path / "lib"
    write_texts(library / "sub", num=30, size=8000)
    for file in (library / "sub").iterdir():
        file.rename(file.with_suffix(".py"))
    foreign = library / "site-packages" / "other"
    foreign.mkdir(parents=True)
    (foreign / "alien.py").write_text("alien = 1\n" * 1000)
    paths = {"stdlib": str(library), "include": str(tmp_path / "absent")}
    monkeypatch.setattr(builtin.sysconfig, "get_path", paths.__getitem__)
    small = load_corpus(DataConfig())
    assert [domain.name for domain in small.domains] == ["python", "names"]
    assert b"alien" not in small.domains[0].train.tobytes() + small.domains[0].valid.tobytes()
    assert any("2 domains" in note for note in small.notes)
    assert sum("left out" in note for note in small.notes) == 4


def test_builtin_domains_keep_to_the_limit():
    for domain in load_corpus(DataConfig(max_mb_per_domain=0.5)).domains:
        assert domain.train.size + domain.valid.size <= 501_000, domain.name  # and a newline between files


def test_docstrings_move_to_prose_and_other_strings_stay():
    source = b'''def f(x):
    """First line.

    Second "line".
    """
    y = """data"""
    return x + "'\\"" + y  # """ not a string
'''
    code, prose = builtin._take_docstrings(source)
    assert prose == b'First line.\n\nSecond "line".\n'
    assert code == b'def f(x):\n    y = """data"""\n    return x + "\'\\"" + y  # """ not a string\n'


def test_an_unclosed_string_does_not_stall_the_scan():
    source = b'"""' + b"word \\x " * 50_000  # exponential time without possessive quantifiers
    assert builtin._take_docstrings(source) == (source, b"")


def test_passages_that_training_has_seen_are_dropped_and_short_ones_kept():
    shared = (
        b"a line of a licence that many files repeat in their head, word for word\nand a second such line"
    )
    seen = {line.strip() for line in shared.split(b"\n")} | {b"import os"}
    assert drop_seen(b"new\n" + shared + b"\nimport os\nalso new", seen) == b"new\nalso new"
    assert drop_seen(b"new\nimport os\nalso new", seen) == b"new\nimport os\nalso new"


# --- the split
# -----------------------------------------------------------------------------------------------


def test_whole_files_go_to_one_side_near_the_asked_share(tmp_path):
    folder = write_texts(tmp_path / "en", num=200, size=1000)
    domain = load_corpus(DataConfig(paths=(str(folder),), valid_frac=0.1)).domains[0]
    train, valid = domain.train.tobytes(), domain.valid.tobytes()
    sides = [(path.read_bytes() in train, path.read_bytes() in valid) for path in folder.iterdir()]
    assert all(in_train != in_valid for in_train, in_valid in sides)
    assert 15 <= sum(in_valid for _, in_valid in sides) <= 25
    assert domain.num_files == 200


def test_copies_of_a_file_land_on_one_side_in_all_domains(tmp_path):
    first = write_texts(tmp_path / "first", num=60)
    second = write_texts(tmp_path / "second", num=60, seed=1)
    for path in first.iterdir():
        (second / f"copy-{path.name}").write_bytes(path.read_bytes())
    domains = load_corpus(DataConfig(paths=(str(first), str(second)))).domains
    trains = [domain.train.tobytes() for domain in domains]
    for domain in domains:
        for text in domain.valid.tobytes().split(b"\n"):
            assert len(text) == 3000
            assert not any(text in train for train in trains)


def eight_bytes_at(data):
    """The 8 bytes at every position as one number: [n - 7]; all different in random data of this size."""
    return np.lib.stride_tricks.sliding_window_view(np.frombuffer(data, np.uint8), 8).copy().view("<u8")[:, 0]


def test_a_big_file_is_cut_into_blocks_with_gaps():
    data = np.random.default_rng(0).integers(0, 256, 500_000, dtype=np.uint8).tobytes()
    file = TextFile(name="big", data=data)
    plan = plan_split({"domain": [file]}, 0.05)
    assert plan == {file.digest: CUT}
    train, valid = split_file(file, plan, 0.05)
    assert 0.0499 < len(valid) / len(data) <= 0.05
    at_train, at_valid = (
        np.flatnonzero(np.isin(eight_bytes_at(data), eight_bytes_at(side))) for side in (train, valid)
    )
    num_blocks = np.count_nonzero(np.diff(at_valid) > 1) + 1
    assert num_blocks == round(len(data) * 0.05 / BLOCK) == 3
    assert np.count_nonzero(np.diff(at_train) > 1) == num_blocks
    after = np.searchsorted(at_train, at_valid)  # the first train position behind each validation position
    assert (at_train[after] - at_valid).min() - 7 > GAP and (at_valid - at_train[after - 1]).min() - 7 > GAP
    # nothing but the gaps is lost
    assert len(train) + len(valid) == len(data) - 2 * GAP * num_blocks


# --- the user's own files
# ------------------------------------------------------------------------------------


def test_folders_and_files_are_domains_and_what_is_left_out_is_said(tmp_path):
    folder = write_texts(tmp_path / "en", num=40)
    (folder / ".hidden").write_text("secret " * 1000)
    (folder / ".git").mkdir()
    (folder / ".git" / "x").write_text("secret " * 1000)
    (folder / "image.gif").write_bytes(b"GIF\0" * 100)
    (tmp_path / "one.txt").write_bytes(
        write_texts(tmp_path / "x", num=1, size=50_000).joinpath("0.txt").read_bytes()
    )
    corpus = load_corpus(DataConfig(paths=(str(folder), str(tmp_path / "one.txt"))))
    assert [domain.name for domain in corpus.domains] == ["en", "one.txt"]
    assert b"secret" not in corpus.domains[0].train.tobytes() + corpus.domains[0].valid.tobytes()
    assert any("image.gif" in note for note in corpus.notes)


def test_a_text_limit_is_kept_and_said(tmp_path):
    folder = write_texts(tmp_path / "en", num=100)
    corpus = load_corpus(DataConfig(paths=(str(folder),), max_mb_per_domain=0.1))
    assert corpus.domains[0].num_files == 33  # of 3000 bytes each
    assert any("0.1 of 0.3 MB" in note for note in corpus.notes)
    assert not load_corpus(DataConfig(paths=(str(folder),), max_mb_per_domain=0)).notes


def test_domains_that_end_alike_are_named_by_their_paths(tmp_path):
    paths = tuple(str(write_texts(tmp_path / name / "en", seed=seed)) for seed, name in enumerate("ab"))
    assert tuple(domain.name for domain in load_corpus(DataConfig(paths=paths)).domains) == paths


@pytest.mark.parametrize("suffix", [".npy", ".bin"])
def test_token_files_are_memory_mapped_and_split_with_a_gap(tmp_path, suffix):
    tokens = np.arange(40_000, dtype=np.uint16)
    path = tmp_path / f"tokens{suffix}"
    if suffix == ".npy":
        np.save(path, tokens)
    else:
        tokens.astype("<u2").tofile(path)
    domain = load_corpus(DataConfig(paths=(str(path),), vocab_size=40_000)).domains[0]
    assert isinstance(domain.train, np.memmap)
    assert (domain.train == tokens[: 38_000 - GAP]).all() and (domain.valid == tokens[38_000:]).all()


@pytest.mark.parametrize("bad", [50_000, -3])
def test_a_token_out_of_range_is_named_with_file_and_position(tmp_path, bad):
    tokens = np.zeros(5_000_000, dtype=np.int32)  # more than one piece of the check
    tokens[4_500_000] = bad
    np.save(tmp_path / "tokens.npy", tokens)
    with pytest.raises(ValueError, match=rf"tokens\.npy.*token {bad} at position 4500000.*data\.vocab_size"):
        load_corpus(DataConfig(paths=(str(tmp_path / "tokens.npy"),), vocab_size=50_000))


def test_the_hash_sees_content_names_and_the_end_of_a_large_token_file(tmp_path):
    folder = write_texts(tmp_path / "en")
    config = DataConfig(paths=(str(folder),))
    first = load_corpus(config).sha256
    assert load_corpus(config).sha256 == first
    (folder / "0.txt").write_bytes(b"!" + (folder / "0.txt").read_bytes()[1:])
    assert load_corpus(config).sha256 != first
    folder = folder.rename(tmp_path / "fr")
    assert load_corpus(DataConfig(paths=(str(folder),))).sha256 != first
    large = np.lib.format.open_memmap(tmp_path / "big.npy", mode="w+", dtype=np.uint8, shape=(80 * 2**20,))
    config = DataConfig(paths=(str(tmp_path / "big.npy"),))
    first, num_train = load_corpus(config).sha256, load_corpus(config).domains[0].train.size
    assert num_train > 64 * 2**20  # or it would not be sampled
    large[num_train - 1] = 1
    large.flush()
    assert load_corpus(config).sha256 != first


def test_the_hash_of_small_domains_covers_every_byte(corpus):
    digest = hashlib.sha256(b"256")
    for domain in corpus.domains[:1]:
        for side, part in (("train", domain.train), ("valid", domain.valid)):
            digest.update(f"\n{domain.name}\n{side} |u1 {part.size}\n".encode() + part.tobytes())
    assert corpus_hash(corpus.domains[:1], 256) == digest.hexdigest()


def bad_paths(tmp_path):
    """Case -> (paths, what the message names)."""
    write_texts(tmp_path / "en")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "small.txt").write_bytes(b"too short to be cut")
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "empty.bin").write_bytes(b"")
    (tmp_path / "text.npy").write_bytes(b"no array at all")
    np.save(tmp_path / "objects.npy", np.array([{}, []], dtype=object), allow_pickle=True)
    np.save(tmp_path / "floats.npy", np.zeros(10))
    np.save(tmp_path / "square.npy", np.zeros((10, 10), dtype=np.uint8))
    (tmp_path / "image").write_bytes(b"\0" * 100)
    return {
        "missing": (["absent"], "absent.*does not exist"),
        "empty folder": (["empty"], "empty.*holds no text"),
        "empty file": (["empty.txt"], r"empty\.txt.*holds no text"),
        "binary file": (["image"], "image.*holds no text"),
        "too small": (["small.txt"], r"small\.txt.*validation part of 0 tokens"),
        "twice": (["en", "./en"], "twice"),
        "part of a token": (["odd.bin"], r"odd\.bin.*multiple of 2.*token_dtype"),
        "empty tokens": (["empty.bin"], r"empty\.bin.*empty"),
        "no array": (["text.npy"], r"text\.npy.*no plain \.npy"),
        "pickled array": (["objects.npy"], r"objects\.npy.*no plain \.npy"),
        "floats": (["floats.npy"], r"floats\.npy.*float64"),
        "two axes": (["square.npy"], r"square\.npy.*\(10, 10\)"),
    }


def test_bad_paths_are_refused_by_name(tmp_path):
    for case, (names, message) in bad_paths(tmp_path).items():
        config = DataConfig(paths=tuple(str(tmp_path) + "/" + name for name in names))
        with pytest.raises(ValueError) as caught:
            load_corpus(config)
        assert re.search(message, str(caught.value)), case


def test_text_beyond_a_small_vocabulary_and_too_long_sequences_are_refused(tmp_path):
    folder = str(write_texts(tmp_path / "en"))
    with pytest.raises(ValueError, match=r"'en' is text with byte 122.*use 256"):
        load_corpus(DataConfig(paths=(folder,), vocab_size=100))
    with pytest.raises(ValueError, match=r"'en'.*validation part.*seq_len=100000"):
        load_corpus(DataConfig(paths=(folder,)), seq_len=100_000)
