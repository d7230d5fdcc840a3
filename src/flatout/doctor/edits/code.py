"""The user's code with positions of its syntax nodes, and edits that change these nodes alone.

Positions are offsets into the file's text. A change is (begin, end, new text). All other text
stays unchanged: comments, spaces, line ends.
"""

from __future__ import annotations

import ast
import io
import tokenize
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from flatout.doctor.edits.source import Source
from flatout.doctor.finding import Edit
from flatout.errors import FlatoutError

Change = tuple[int, int, str]

_QUIET = (tokenize.NL, tokenize.COMMENT, tokenize.NEWLINE)


class Unsure(Exception):
    """Raised when an edit cannot be proven right."""


class Code:
    """One parsed file."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.file = source.file
        self.lines = source.lines
        self.starts = [0, *accumulate(map(len, self.lines))]
        try:
            self.tree = ast.parse(source.text)
            self._tokens = [
                (self._at(*token.start), self._at(*token.end), token.string)
                for token in tokenize.generate_tokens(io.StringIO(source.text, newline="").readline)
                if token.type not in _QUIET
            ]
        except (SyntaxError, ValueError, RecursionError, tokenize.TokenError) as error:
            raise Unsure(str(error)) from None
        self.parents = {
            child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }

    @classmethod
    def of(cls, file: str) -> Code:
        """Read and parse a file."""
        try:
            return cls(Source.read(file))
        except FlatoutError as error:
            raise Unsure(str(error)) from None

    # -- positions -------------------------------------------------------------------------------

    def _at(self, line: int, column: int) -> int:
        return self.starts[min(line, len(self.lines) + 1) - 1] + column

    def begin(self, node: ast.AST) -> int:
        """Return the offset at which a node begins, without parentheses around the node."""
        return self._of_bytes(node.lineno, node.col_offset)  # type: ignore[attr-defined]

    def end(self, node: ast.AST) -> int:
        """Return the offset at which a node ends, without parentheses around the node."""
        return self._of_bytes(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def _of_bytes(self, line: int, column: int) -> int:
        # ast counts columns in bytes of UTF-8.
        before = self.lines[line - 1].encode()[:column].decode()
        return self._at(line, len(before))

    def outer_end(self, node: ast.AST, within: ast.AST | None = None) -> int:
        """Return the offset at which a node ends, with the parentheses around the node."""
        end = self.end(node)
        last = self.end(within) - 1 if within is not None else len(self.source.text)
        for begin, after, words in self._tokens:
            if begin >= end:
                if words != ")" or begin >= last:
                    break
                end = after
        return end

    def next_token(self, at: int) -> tuple[int, str]:
        """Return the offset and the text of the first token at or after an offset."""
        return next((begin, words) for begin, _, words in self._tokens if begin >= at)

    def line_of(self, at: int) -> int:
        """Return the line number of an offset, from 1."""
        return min(bisect_right(self.starts, at), len(self.lines))

    # -- nodes -----------------------------------------------------------------------------------

    def statements(self, line: int) -> list[ast.stmt]:
        """Return the innermost statements of a line; a compound statement spans only its head."""
        result = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.stmt) and node.lineno <= line <= _end_of_head(node)
        ]
        return [item for item in result if not any(self.is_within(other, item) for other in result)]

    def is_within(self, node: ast.AST, outer: ast.AST) -> bool:
        """Return True if `node` is a descendant of `outer`."""
        above = self.parents.get(node)
        while above is not None and above is not outer:
            above = self.parents.get(above)
        return above is outer

    def heads(self, line: int) -> Iterator[ast.AST]:
        """Iterate over all nodes of the statements at a line, without blocks in them."""
        for statement in self.statements(line):
            yield from parts(statement)

    def calls(self, line: int) -> list[ast.Call]:
        """Return the calls on a line."""
        return [
            node
            for node in self.heads(line)
            if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or 0)
        ]

    def above(self, node: ast.AST, *kinds: type[ast.AST]) -> ast.AST | None:
        """Return the innermost ancestor of these kinds."""
        result = self.parents.get(node)
        while result is not None and not isinstance(result, kinds):
            result = self.parents.get(result)
        return result

    def function(self, node: ast.AST) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.Module:
        """Return the function around a node; the module if there is none."""
        result = self.above(node, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        if isinstance(result, ast.Lambda):
            raise Unsure("it is in a lambda")
        if isinstance(result, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return result
        return self.tree

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the innermost statement around a node, or the node if it is a statement."""
        result = node if isinstance(node, ast.stmt) else self.above(node, ast.stmt)
        assert isinstance(result, ast.stmt)
        return result

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the list of statements that contains a statement."""
        for _, value in ast.iter_fields(self.parents[statement]):
            if isinstance(value, list) and any(item is statement for item in value):
                return value
        raise Unsure("it stands in no block")

    # -- lines -----------------------------------------------------------------------------------

    def indent(self, statement: ast.stmt) -> str:
        """Return the whitespace before a statement."""
        line = self.lines[first_line(statement) - 1]
        space = line[: len(line) - len(line.lstrip(" \t"))]
        if self.begin(statement) - self.starts[statement.lineno - 1] != len(space):
            raise Unsure("something else stands before it on its line")
        return space

    def deeper(self, statement: ast.stmt) -> str:
        """Return the whitespace that one more level of indentation adds to a statement's."""
        inner = self.indent(statement)
        outer = self.parents[statement]
        while not isinstance(outer, (ast.stmt, ast.Module)):
            outer = self.parents[outer]
        if isinstance(outer, ast.stmt):
            space = self.indent(outer)
            if inner.startswith(space) and inner != space:
                return inner[len(space) :]
        blocks = (n for n in ast.walk(self.tree) if isinstance(n, ast.stmt) and n.col_offset)
        first = next((n for n in blocks if self._begins_line(n)), None)
        return self.indent(first) if first is not None else "    "

    def _begins_line(self, statement: ast.stmt) -> bool:
        return not self.lines[statement.lineno - 1].encode()[: statement.col_offset].strip()

    def has_own_lines(self, statement: ast.stmt) -> bool:
        """Return True if no other statement stands on the lines of a statement."""
        last = statement.end_lineno or statement.lineno
        rest = self.lines[last - 1].encode()[statement.end_col_offset :].decode().strip()
        return self._begins_line(statement) and (not rest or rest.startswith("#"))

    @property
    def newline(self) -> str:
        """Line end of this file."""
        return self._ending(1) or "\n"

    def _ending(self, line: int) -> str:
        text = self.lines[line - 1]
        return text[len(text.rstrip("\r\n")) :]

    # -- edits -----------------------------------------------------------------------------------

    def edit(self, *changes: Change) -> Edit:
        """Return these changes as one Edit of whole lines."""
        ordered = sorted(changes, key=lambda change: change[:2])
        first = self.line_of(ordered[0][0])
        last = max(self.line_of(end) for _, end, _ in ordered)
        begin, end = self.starts[first - 1], self.starts[last]
        words, position = [], begin
        for start, stop, new in ordered:
            words += [self.source.text[position:start], new]
            position = stop
        words.append(self.source.text[position:end])
        ending = self._ending(last)
        before = self.source.text[begin:end].removesuffix(ending)
        return Edit(self.file, first, before, "".join(words).removesuffix(ending))

    def without(self, statement: ast.stmt) -> Edit:
        """Return an Edit that removes a statement, with `pass` if its block would be empty."""
        if len(self.block(statement)) > 1 and self.has_own_lines(statement):
            first, last = statement.lineno, statement.end_lineno or statement.lineno
            words = "".join(self.lines[first - 1 : last])
            return Edit(self.file, first, words.removesuffix(self._ending(last)), "")
        return self.edit((self.begin(statement), self.end(statement), "pass"))

    def before(self, statement: ast.stmt, *words: str) -> Change:
        """Return the change that inserts lines before a statement and its decorators."""
        self.indent(statement)
        return self.before_line(first_line(statement), *words)

    def before_line(self, line: int, *words: str) -> Change:
        """Return the change that inserts lines, equally indented, before a line.

        A statement or `def` has to begin on that line.
        """
        text = self.lines[line - 1]
        space = text[: len(text) - len(text.lstrip(" \t"))]
        begin = self.starts[line - 1]
        return begin, begin, "".join(f"{space}{each}{self.newline}" for each in words)

    def after(self, statement: ast.stmt, *words: str) -> Change:
        """Return the change that inserts lines after a statement."""
        if not self.has_own_lines(statement):
            raise Unsure("another statement stands on its line")
        last = statement.end_lineno or statement.lineno
        end = self.starts[last] - len(self._ending(last))
        indent = self.indent(statement)
        return end, end, "".join(f"{self.newline}{indent}{line}" for line in words)

    def under(self, head: str, statements: Sequence[ast.stmt]) -> list[Change]:
        """Return the changes that put consecutive statements under a head such as `with x:`."""
        first, last = statements[0], statements[-1]
        if not all(self.has_own_lines(statement) for statement in statements):
            raise Unsure("another statement stands on its line")
        # Indentation would change the value of a string literal of several lines.
        if any(_is_long_text(part) for statement in statements for part in ast.walk(statement)):
            raise Unsure("it has a text of several lines")
        indent, deeper = self.indent(first), self.deeper(first)
        changes = [self.before(first, head)]
        for number in range(first_line(first), (last.end_lineno or last.lineno) + 1):
            line = self.lines[number - 1]
            if line.strip():
                begin = self.starts[number - 1] + (len(indent) if line.startswith(indent) else 0)
                changes.append((begin, begin, deeper))
        return changes

    def with_arguments(self, call: ast.Call, **values: str) -> list[Change]:
        """Return the changes that set keyword arguments of a call, present or not."""
        named = {word.arg: word.value for word in call.keywords}
        changes = [
            (self.begin(named[name]), self.end(named[name]), value)
            for name, value in values.items()
            if name in named
        ]
        more = [f"{name}={value}" for name, value in values.items() if name not in named]
        return changes + (self._with_more(call, more) if more else [])

    def _with_more(self, call: ast.Call, words: Sequence[str]) -> list[Change]:
        given: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
        is_named = all(word.arg is not None for word in call.keywords)
        if any(isinstance(arg, ast.Starred) for arg in call.args) or not is_named:
            raise Unsure("what is passed by * or ** is not known")
        closes = self.end(call) - 1
        if not given:
            return [(closes, closes, ", ".join(words))]
        last = max(given, key=self.begin)
        end = self.outer_end(last, call)
        line = self.lines[last.lineno - 1]
        space = line[: len(line) - len(line.lstrip(" \t"))]
        if self.begin(last) - self.starts[last.lineno - 1] != len(space):
            return [(end, end, "".join(f", {each}" for each in words))]
        # Each argument has its own line, and so has each new argument. A comment stays on its line.
        comma, result = self.next_token(end)
        is_comma = result == ","
        line_ends = self.starts[self.line_of(comma if is_comma else end)]
        if closes < line_ends:
            return [(end, end, "".join(f",{self.newline}{space}{each}" for each in words))]
        lines = f",{self.newline}".join(f"{space}{each}" for each in words)
        new = (line_ends, line_ends, f"{lines}{',' if is_comma else ''}{self.newline}")
        return [new] if is_comma else [(end, end, ","), new]

    def without_argument(self, call: ast.Call, keyword: ast.keyword) -> list[Change]:
        """Return the changes that remove an argument and its comma."""
        given: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
        given.sort(key=self.begin)
        number = given.index(keyword)
        end = self.outer_end(keyword, call)
        if len(given) == 1:
            comma, words = self.next_token(end)
            return [(self.begin(keyword), comma + 1 if words == "," else end, "")]
        first, last = keyword.lineno, self.line_of(end)
        alone = f"{self.source.text[self.begin(keyword) : end]},"
        whole = "".join(self.lines[first - 1 : last]).partition("#")[0]
        if whole.strip() == alone:
            return [(self.starts[first - 1], self.starts[last], "")]
        if number:
            begin = self.outer_end(given[number - 1], call)
            if "#" in self.source.text[begin : self.begin(keyword)]:
                raise Unsure("a comment would go too")
            return [(begin, end, "")]
        return [(self.begin(keyword), self.begin(given[1]), "")]


def parts(statement: ast.stmt) -> Iterator[ast.AST]:
    """Iterate over the nodes of a statement, without statements in its block or function."""
    left: list[ast.AST] = [statement]
    while left:
        node = left.pop()
        yield node
        # Before Python 3.12, nodes within f-strings have wrong positions.
        if isinstance(node, (ast.Lambda, ast.JoinedStr)):
            continue
        left += [
            child
            for child in ast.iter_child_nodes(node)
            if not isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case))
        ]


def inside(statements: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Iterate over all nodes in these nodes, without the bodies of nested functions and classes."""
    left = list(statements)
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            left += ast.iter_child_nodes(node)


def first_line(statement: ast.stmt) -> int:
    """Return the line in which a statement begins, including its decorators."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def name_of(func: ast.AST) -> str:
    """Return the last part of a dotted name: "step" of `a.b.step`; "" if there is no name."""
    if isinstance(func, ast.Attribute):
        return func.attr
    return func.id if isinstance(func, ast.Name) else ""


def _end_of_head(node: ast.stmt) -> int:
    body = getattr(node, "body", None) or getattr(node, "cases", None)
    if not isinstance(body, list) or not body:
        return node.end_lineno or node.lineno
    first = body[0]
    begins = first_line(first) if isinstance(first, ast.stmt) else first.pattern.lineno
    return max(node.lineno, int(begins) - 1)


def _is_long_text(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (str, bytes)) and node.lineno != node.end_lineno
    return isinstance(node, ast.JoinedStr) and node.lineno != node.end_lineno
