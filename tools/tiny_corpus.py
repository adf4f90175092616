"""The corpus of the bundled base: the prose that a stock CPython carries, and chats made from its docstrings.

Sources, all under the PSF-2.0 licence of CPython itself: the Language Reference (`pydoc_data.topics`), IDLE's help,
docstrings and comment prose of the standard library, docstrings of the C modules, comments of the C headers. Files that
carry a licence notice of their own are left out, and so is whatever was installed into `site-packages`. The same Python
gives the same corpus, byte for byte.
"""

from __future__ import annotations

import ast
import hashlib
import html
import importlib
import inspect
import io
import re
import sys
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

OWN_LICENCE = re.compile(r"permission (is|to use)|licensed under|all rights reserved", re.IGNORECASE)
LEFT_OUT = (
    "site-packages/",
    "ensurepip/_bundled/",
    "pydoc_data/",
    "encodings/",
    "__pycache__/",
    "config-",
    "_sysconfig",
)
PROSE_COMMENT_CHARS = 120
"""Comment blocks shorter than this are labels, not prose."""


SYSTEM = "You answer questions about Python and its standard library."
TURNS = 3
"""Questions about one source that share a conversation, at most."""


@dataclass
class Document:
    """One source's prose, in order. `chats` are (question, answer) pairs about the same source."""

    name: str
    texts: list[str]
    chats: list[tuple[str, str]] = field(default_factory=list)

    @property
    def held_out(self) -> bool:
        """About one document in 64, chosen by name, so that a changed corpus keeps its split."""
        return hashlib.sha256(self.name.encode()).digest()[0] < 4


def training_texts(document: Document) -> Iterator[str]:
    """What the model reads of a document: its prose, then conversations in the form of the chat template."""
    if document.texts:
        yield "\n\n".join(document.texts) + "<|endoftext|>"
    for start in range(0, len(document.chats), TURNS):
        system = f"<|system|>{SYSTEM}<|end|>" if start // TURNS % 3 == 0 else ""
        turns = (f"<|user|>{q}<|end|><|assistant|>{a}<|end|>" for q, a in document.chats[start : start + TURNS])
        yield system + "".join(turns) + "<|endoftext|>"


def build_corpus() -> list[Document]:
    """All documents, in a fixed order, without paragraphs that an earlier document had."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    include = Path(sysconfig.get_paths()["include"])
    documents = [
        *_topics(),
        *_idle_help(stdlib),
        *_python_files(stdlib),
        *_c_modules(),
        *_headers(include),
    ]
    seen: set[str] = set()
    for document in documents:
        document.texts = [text for text in document.texts if _is_new(text, seen)]
    return [document for document in documents if document.texts or document.chats]


def _is_new(text: str, seen: set[str]) -> bool:
    key = re.sub(r"\W+", " ", text).lower()
    if key in seen:
        return False
    seen.add(key)
    return True


def _topics() -> Iterator[Document]:
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    for name in sorted(topics):
        yield Document(f"topics/{name}", [topics[name].strip()])


def _idle_help(stdlib: Path) -> Iterator[Document]:
    page = (stdlib / "idlelib" / "help.html").read_text(encoding="utf-8")
    body = page[page.index('<section id="idle">') : page.index('<div class="clearer">')]
    text = html.unescape(re.sub(r"<[^>]+>", "", body)).replace("¶", "")
    yield Document("idlelib/help", [re.sub(r"\n\s*\n+", "\n\n", text).strip()])


def _python_files(stdlib: Path) -> Iterator[Document]:
    for path in sorted(stdlib.rglob("*.py"), key=lambda p: p.relative_to(stdlib).as_posix()):
        name = path.relative_to(stdlib).as_posix()
        if any(part in name for part in LEFT_OUT):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (UnicodeDecodeError, SyntaxError, ValueError):  # test files that are broken on purpose
            continue
        if OWN_LICENCE.search(source):
            continue
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        pieces = [*_docstrings(tree, module), *_comments(source)]
        texts = [text for _, text in sorted(pieces, key=lambda piece: piece[0])]
        yield Document(name, texts, [] if module.startswith("test.") else list(_chats(tree, module)))


def _docstrings(tree: ast.Module, module: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring, below the name and the arguments of what it describes."""
    for node, name in _named(tree, module):
        doc = ast.get_docstring(node)
        if doc is None or len(doc) < 20:
            continue
        if isinstance(node, ast.Module):
            yield 0, doc
            continue
        heading = f"class {name}" if isinstance(node, ast.ClassDef) else f"{name}({ast.unparse(node.args)})"
        yield node.lineno, f"{heading}\n\n{doc}"


Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _named(node: Documented, name: str) -> Iterator[tuple[Documented, str]]:
    yield node, name
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _named(child, f"{name}.{child.name}")


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every run of comment lines that reads like prose."""
    block: list[str] = []
    start = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.line.strip() != token.string:
            continue
        if token.start[0] != last + 1:
            if text := _prose(block):
                yield start, text
            block, start = [], token.start[0]
        last = token.start[0]
        block.append(token.string.lstrip("#").removeprefix(" ").rstrip())
    if text := _prose(block):
        yield start, text


def _prose(lines: list[str]) -> str:
    """The block, or nothing where it is short, ruled or commented-out code."""
    lines = [line for line in lines if not re.fullmatch(r"[\s#*=_~+-]*", line) or not line.strip()]
    text = "\n".join(lines).strip()
    letters = sum(c.isalpha() or c == " " for c in text)
    return text if len(text) >= PROSE_COMMENT_CHARS and letters > 0.85 * len(text) else ""


def _chats(tree: ast.Module, module: str) -> Iterator[tuple[str, str]]:
    for node, name in _named(tree, module):
        doc = ast.get_docstring(node)
        if doc is None or any(part.startswith("_") for part in name.split(".")):
            continue
        if answer := _first_paragraphs(doc):
            yield _question(node, name), answer


def _question(node: Documented, name: str) -> str:
    """One of a few ways to ask, chosen by the name."""
    match node:
        case ast.Module():
            ways = ("What is the module {} for?", "Tell me about the module {}.", "What is {}?")
        case ast.ClassDef():
            ways = ("What is {}?", "What is the class {} for?", "Describe {}.")
        case _:
            ways = ("What does {} do?", "Explain {}.", "What is {} for?")
    return _pick(name, ways).format(name)


def _pick(name: str, ways: Sequence[str]) -> str:
    return ways[hashlib.sha256(name.encode()).digest()[1] % len(ways)]


def _first_paragraphs(doc: str) -> str:
    """Up to two paragraphs of running text, each on one line."""
    kept: list[str] = []
    for paragraph in re.split(r"\n\s*\n", doc):
        flat = " ".join(paragraph.split())
        if paragraph.startswith((" ", "\t", ">>>", "-", "*")) or "::" in flat or not re.search(r"[.!)]$", flat):
            break
        kept.append(flat)
        if len(kept) == 2:
            break
    text = "\n\n".join(kept)
    return text if 24 <= len(text) <= 900 else ""


def _c_modules() -> Iterator[Document]:
    for name in sorted(sys.stdlib_module_names):
        if name in ("antigravity", "this", "idlelib", "lib2to3") or name.startswith(("_test", "_xx", "xx")):
            continue
        try:
            module = importlib.import_module(name)
        except ImportError:  # another platform's, or not built here
            continue
        if str(getattr(module, "__file__", None) or "").endswith(".py"):
            continue
        texts, chats = [inspect.getdoc(module) or ""], []
        for heading, doc in _members(module, name):
            texts.append(f"{heading}\n\n{doc}")
            if "._" not in heading and (answer := _first_paragraphs(doc)):
                chats.append(
                    (_pick(heading, ("What does {} do?", "Explain {}.", "What is {}?")).format(heading), answer)
                )
        yield Document(f"c/{name}", [text for text in texts if len(text) >= 40], chats)


def _members(module: ModuleType, name: str) -> Iterator[tuple[str, str]]:
    for key in sorted(vars(module)):
        value = vars(module)[key]
        if not callable(value) or getattr(value, "__module__", None) not in (name, name.lstrip("_")):
            continue
        if doc := _own_doc(value):
            yield f"{name}.{key}", doc
        if inspect.isclass(value):
            for method in sorted(vars(value)):
                if doc := _own_doc(vars(value)[method]):
                    yield f"{name}.{key}.{method}", doc


def _own_doc(value: object) -> str:
    doc = getattr(value, "__doc__", None)
    return inspect.cleandoc(doc) if isinstance(doc, str) and len(doc) >= 40 else ""


def _headers(include: Path) -> Iterator[Document]:
    for path in sorted(include.rglob("*.h")):
        source = path.read_text(encoding="utf-8")
        if OWN_LICENCE.search(source) or path.name == "pyconfig.h":
            continue
        blocks = re.findall(r"/\*(.*?)\*/", source, re.DOTALL)
        lines = [[re.sub(r"^\s*\*?\s?", "", line).rstrip() for line in block.split("\n")] for block in blocks]
        yield Document(
            f"include/{path.relative_to(include).as_posix()}", [t for block in lines if (t := _prose(block))]
        )
