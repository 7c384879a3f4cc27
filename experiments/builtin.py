"""The built-in corpus: text that every CPython installation carries, in domains that really differ.

Feeds `experiments.data.load_corpus` where the user names no files. Flow: files of the standard library
(never of installed packages) -> split by content (`corpus.plan_split`) -> domains -> validation lines that
training has seen are dropped.

    prose    docstrings, the help texts of pydoc, plain-text files
    python   the library's source without its docstrings
    c        the interpreter's header files
    names    Unicode characters with their names, HTML entities
    tables   character tables of the encodings, each line once
    numbers  arithmetic test cases (absent where the distribution leaves the test suite out)
"""

import ast
import html.entities
import math
import os
import re
import sysconfig
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.corpus import Domain, TextFile, in_hash_order, plan_split, split_file, text_domain

MAX_DOMAIN_BYTES = 5_000_000  # bytes of one built-in domain
MIN_DOMAIN_BYTES = 100_000  # a smaller domain has too little to validate on
GOOD_DOMAINS, GOOD_BYTES = 4, 8_000_000
SEEN_RUN = 96  # bytes of neighbouring validation lines, all of them in the train text, that count as a copy

# Strings and comments of Python source. All are matched so that a quote inside one cannot open another; the
# possessive quantifiers (++, *+) keep the scan linear on a string that never closes.
_TOKENS = re.compile(
    rb'"""(?:[^"\\]++|\\.|"(?!""))*+"""'
    rb"|'''(?:[^'\\]++|\\.|'(?!''))*+'''"
    rb"|#[^\n]*+"
    rb'|"(?:[^"\\\n]++|\\.)*+"'
    rb"|'(?:[^'\\\n]++|\\.)*+'",
    re.DOTALL,
)
_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
_TABLE_PREFIXES = ("cp", "iso8859", "koi8", "mac_", "kz1048", "ptcp", "tis", "hp_")
# machine-made or site-made modules: nothing of the library
_FOREIGN = re.compile(r"(?:^|/)(?:_sysconfigdata[^/]*|sitecustomize|usercustomize|_pydoc_topics)\.py$")


def read_builtin(*, valid_frac: float, max_bytes: int) -> tuple[list[Domain], list[str]]:
    """The built-in domains in a fixed order, and notes on what this installation lacks.

    max_bytes: most bytes of a domain (0 = the built-in limit of 5 MB, which also bounds larger values). The
    same installation always gives the same bytes: no file times, no locale, no order of the file system.
    """
    limit = min(max_bytes or MAX_DOMAIN_BYTES, MAX_DOMAIN_BYTES)
    groups = _source_groups()
    plan = plan_split(groups, valid_frac)
    sides = {
        name: [split_file(file, plan, valid_frac) for file in files if file.data]
        for name, files in groups.items()
    }
    valid_limit = math.ceil(limit * valid_frac)
    return _finish(_domain_parts(sides), limit - valid_limit, valid_limit)


def _domain_parts(sides: dict[str, list[tuple[bytes, bytes]]]) -> dict[str, list[tuple[bytes, bytes]]]:
    """(train, valid) texts by domain: source files give their docstrings to prose and the rest to python."""
    divided = [(_take_docstrings(train), _take_docstrings(valid)) for train, valid in sides["source"]]
    docstrings = [(train[1], valid[1]) for train, valid in divided]
    return {
        "prose": [*sides["topics"], *sides["text"], *docstrings],
        "python": [(train[0], valid[0]) for train, valid in divided],
        **{name: sides[name] for name in ("c", "names", "tables", "numbers")},
    }


def _finish(
    parts: dict[str, list[tuple[bytes, bytes]]], limit: int, valid_limit: int
) -> tuple[list[Domain], list[str]]:
    """Cut to the limits (bytes), drop validation text that training has seen, leave small domains out."""
    train = {name: _up_to([text for text, _ in texts], limit) for name, texts in parts.items()}
    seen = _lines(text for texts in train.values() for text in texts)
    domains: list[Domain] = []
    notes: list[str] = []
    for name, texts in parts.items():
        valid = _up_to([drop_seen(text, seen) for _, text in texts], valid_limit)
        num_files = sum(1 for sides in zip(train[name], valid) if any(sides))
        domain = text_domain(name, train[name], valid, num_files)
        if domain.train.size + domain.valid.size >= min(MIN_DOMAIN_BYTES, limit // 2):
            domains.append(domain)
        else:
            notes.append(f"built-in domain {name!r} is left out: this Python carries too little of it")
    total = sum(domain.train.size + domain.valid.size for domain in domains)
    if len(domains) < GOOD_DOMAINS or total < min(GOOD_BYTES, 2 * limit):
        notes.append(
            f"the built-in corpus has {len(domains)} domains and {total / 1e6:.1f} MB here, "
            f"{GOOD_DOMAINS} and {GOOD_BYTES / 1e6:.0f} MB are usual; "
            "a full Python installation or data.paths gives more"
        )
    return domains, notes


def _up_to(texts: Sequence[bytes], limit: int) -> list[bytes]:
    """Whole texts in order where they fit the limit (bytes), else b""; a first text that is larger is cut."""
    kept: list[bytes] = []
    room = limit
    for text in texts:
        if len(text) > room:
            text = text[:room] if room == limit else b""
        kept.append(text)
        room -= len(text)
    return kept


# --- leakage --------------------------------------------------------------------------------------


def _lines(texts: Iterable[bytes]) -> set[bytes]:
    seen: set[bytes] = set()
    for text in texts:
        seen.update(map(bytes.strip, text.split(b"\n")))
    seen.add(b"")
    return seen


def drop_seen(text: bytes, seen: set[bytes]) -> bytes:
    """The text without runs of lines, SEEN_RUN bytes or more, that are all in seen (stripped train lines).

    Whole files go to one side, but files share passages (licences, tables, code that was copied): what
    training has seen says nothing about what was learnt.
    """
    kept: list[bytes] = []
    run: list[bytes] = []
    run_bytes = 0
    for line in [*text.split(b"\n"), None]:
        if line is not None and line.strip() in seen:
            run.append(line)
            run_bytes += len(line.strip())
            continue
        if run_bytes < SEEN_RUN:
            kept.extend(run)
        run, run_bytes = [], 0
        if line is not None:
            kept.append(line)
    return b"\n".join(kept)


# --- the sources ----------------------------------------------------------------------------------


def _source_groups() -> dict[str, list[TextFile]]:
    """Files by kind, before the split. Made-up files (topics, names, tables) count as one file each."""
    library = Path(sysconfig.get_path("stdlib"))
    names = in_hash_order(_list_library(library))
    folders = {name: frozenset(name.split("/")[:-1]) for name in names}
    tables = sorted(name for name in names if _is_table(name, folders[name]))
    numbers = [name for name in names if _is_cases(name, folders[name])]
    source = [n for n in names if n.endswith(".py") and not folders[n] & {*_TEST_FOLDERS, "pydoc_data"}]
    sources = [name for name in names if name.endswith((".c", ".h"))]
    text = [name for name in names if name.endswith((".txt", ".rst"))]
    return {
        "source": _read(library, _without(source, tables)),
        "text": [file for file in _read(library, _without(text, numbers)) if _is_utf8(file.data)],
        "c": [
            *_read_headers(Path(sysconfig.get_path("include"))),
            *_read(library, sources),
        ],
        "numbers": _read(library, numbers),
        "topics": [TextFile(name="topics", data=_topics(library / "pydoc_data" / "topics.py"))],
        "names": [TextFile(name="names", data=_unicode_names() + _html_entities())],
        "tables": [TextFile(name="tables", data=_distinct_lines(_read(library, tables)))],
    }


def _without(names: Sequence[str], others: Iterable[str]) -> list[str]:
    """The names that are not among the others, in their order."""
    left_out = frozenset(others)
    return [name for name in names if name not in left_out]


def _is_table(name: str, folders: frozenset[str]) -> bool:
    return "encodings" in folders and name.rpartition("/")[2].startswith(_TABLE_PREFIXES)


def _is_cases(name: str, folders: frozenset[str]) -> bool:
    """Arithmetic cases; those of fixed formats (ddAdd beside add) copy the general ones but for a label."""
    last = name.rpartition("/")[2]
    if last.endswith(".decTest"):
        return not re.match("d[dqs][A-Z]", last)
    return "test" in folders and last.endswith(("testcases.txt", "floating_points.txt"))


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _list_library(root: Path) -> list[str]:
    """Paths of the library's own files below root; no packages, caches or links (which lead elsewhere)."""
    found: list[str] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.endswith(("-packages", "__pycache__"))]
        below = os.path.relpath(folder, root).replace(os.sep, "/")
        prefix = "" if below == "." else below + "/"
        found.extend(prefix + name for name in names if not os.path.islink(os.path.join(folder, name)))
    return [name for name in found if not _FOREIGN.search(name)]


def _read(root: Path, names: Iterable[str]) -> list[TextFile]:
    return [TextFile(name=name, data=(root / name).read_bytes()) for name in names]


def _read_headers(root: Path) -> list[TextFile]:
    """The interpreter's headers; other folders beside them belong to installed packages."""
    own = ("*.h", "cpython/*.h", "internal/**/*.h")
    names = [path.relative_to(root).as_posix() for pattern in own for path in root.glob(pattern)]
    return _read(root, in_hash_order(names))


def _take_docstrings(source: bytes) -> tuple[bytes, bytes]:
    """(code, docstrings): triple-quoted strings that fill whole lines are moved, without their indent."""
    code: list[bytes] = []
    prose: list[bytes] = []
    done = 0
    for match in _TOKENS.finditer(source):
        text = match.group()
        if not text.startswith((b'"""', b"'''")):
            continue
        start = source.rfind(b"\n", 0, match.start()) + 1
        end = source.find(b"\n", match.end()) + 1 or len(source)
        before = source[start : match.start()]
        if before.strip() in (b"", b"r", b"R") and not source[match.end() : end].strip():
            code.append(source[done:start])
            indent = before[: len(before) - len(before.lstrip())]
            prose.append(text[3:-3].replace(b"\n" + indent, b"\n").strip() + b"\n")
            done = end
    return b"".join([*code, source[done:]]), b"\n".join(prose)


def _topics(path: Path) -> bytes:
    """The help texts of pydoc, read without importing (an import could write a cache file)."""
    if not path.is_file():
        return b""
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            topics = ast.literal_eval(node.value)
            return "\n".join(topics[key] for key in sorted(topics)).encode()
    return b""


def _unicode_names() -> bytes:
    """One line a character: code point, itself, name. Characters named by rule (ideographs) are left out."""
    lines: list[str] = []
    for code in range(0x20000):
        name = unicodedata.name(chr(code), "")
        if name and "IDEOGRAPH" not in name and not name.startswith("HANGUL SYLLABLE"):
            lines.append(f"{code:04X} {chr(code)} {name}\n")
    return "".join(lines).encode()


def _html_entities() -> bytes:
    entities = html.entities.html5
    lines = [f"&{key} {' '.join(f'U+{ord(c):04X}' for c in entities[key])}\n" for key in sorted(entities)]
    return "".join(lines).encode()


def _distinct_lines(files: Iterable[TextFile]) -> bytes:
    """All lines in order, each once: the tables repeat each other, which would leak."""
    return b"\n".join(dict.fromkeys(line for file in files for line in file.data.split(b"\n")))
