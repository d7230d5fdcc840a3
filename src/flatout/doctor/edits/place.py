"""Location of a finding in the user's code, and the syntax nodes there."""

from __future__ import annotations

import ast
import builtins
import os
from dataclasses import dataclass
from functools import cached_property

from flatout.doctor.edits.code import Code, Unsure, name_of
from flatout.doctor.edits.names import calls_of, values
from flatout.doctor.finding import Finding
from flatout.observe import Call, Observation, Site

_LOSSES = ("criterion", "loss_fn", "loss_function", "loss_func", "objective")


@dataclass(frozen=True)
class FoundAt:
    """A finding and its line.

    Attributes:
        finding: the finding.
        seen: observation of the rank with the finding.
        file: path of the user's file, as Python names it.
        line: line number in the file, from 1.
    """

    finding: Finding
    seen: Observation
    file: str
    line: int

    @classmethod
    def of(cls, finding: Finding, observation: Observation) -> FoundAt:
        """Locate a finding at the line that it names, otherwise at the optimizer's step."""
        steps = [str(optimizer.site) for optimizer in observation.optimizers if optimizer.site]
        file, _, line = (finding.where or next(iter(steps), "")).rpartition(":")
        if not (file and line.isdecimal()):
            raise Unsure("it has no place in the code")
        return cls(finding, observation, file, int(line))

    @cached_property
    def code(self) -> Code:
        """Parsed file of the finding."""
        code = Code.of(self.file)
        line = "".join(code.lines[self.line - 1 : self.line]).strip()
        here = [
            site for site in sites(self.seen) if (site.file, site.line) == (self.file, self.line)
        ]
        if any(item.code not in ("", line) for item in here):
            raise Unsure("the file has changed since")
        return code

    @cached_property
    def statement(self) -> ast.stmt:
        """The only statement on the line."""
        result = self.code.statements(self.line)
        if len(result) != 1:
            raise Unsure(f"{len(result)} statements stand on the line")
        return result[0]

    def call(self, *names: str) -> ast.Call:
        """Return the only call of these names on the line."""
        result = [call for call in self.code.calls(self.line) if name_of(call.func) in names]
        if len(result) != 1:
            raise Unsure(f"{len(result)} calls of {names[0]} stand on the line")
        return result[0]

    @property
    def is_told(self) -> bool:
        """True if a training argument is passed with each call of a model, as in Keras."""
        return any(model.is_told for model in self.seen.models)

    def codes(self) -> list[Code]:
        """Return this file and all other files of the user whose lines were observed."""
        return [self.code, *map(Code.of, sorted(files(self.seen) - {self.file}))]

    def only_call(self, *names: str) -> tuple[Code, ast.Call]:
        """Return the only call of these names in this file and all other observed files."""
        result = [(code, call) for code in self.codes() for call in calls_of(code, *names)]
        if len(result) != 1:
            raise Unsure(f"there are {len(result)} calls of {names[0]}")
        return result[0]

    def seen_call(self, *kinds: str) -> Call:
        """Return the observation of the calls on the line."""
        for call in self.seen.calls:
            if call.kind in kinds and str(call.site) == self.finding.where:
                return call
        raise Unsure("the calls themselves were not observed")

    def model(self) -> ast.expr:
        """Return the model that is called on the line, such as `model` or `self.model`."""
        functions = [call.func for call in self.code.calls(self.line)]
        result = {ast.unparse(func): func for func in functions if self._may_be_model(func)}
        if len(result) != 1:
            raise Unsure("which of the calls is the model's cannot be seen")
        return next(iter(result.values()))

    def _may_be_model(self, func: ast.expr) -> bool:
        if isinstance(func, ast.Attribute):
            is_own = isinstance(func.value, ast.Name) and func.value.id == "self"
            return is_own and not self._is_defined(func.attr) and not self._is_loss(func)
        if not isinstance(func, ast.Name) or func.id in dir(builtins):
            return False
        return not self._is_defined(func.id) and not self._is_loss(func)

    def _is_defined(self, name: str) -> bool:
        for node in ast.walk(self.code.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                if node.name == name:
                    return True
            elif isinstance(node, (ast.Import, ast.ImportFrom)) and any(
                (alias.asname or alias.name) == name for alias in node.names
            ):
                return True
        return False

    def _is_loss(self, func: ast.Name | ast.Attribute) -> bool:
        if name_of(func) in _LOSSES:
            return True
        try:
            made = values(self.code, func)
        except Unsure:
            return False
        return all(isinstance(v, ast.Call) and name_of(v.func).endswith("Loss") for v in made)


def sites(observation: Observation) -> list[Site]:
    """Return the observed locations in the user's code."""
    result = [call.site for call in observation.calls]
    result += [
        one
        for loader in observation.loaders
        for one in (loader.site, loader.made_at, loader.dataset_site)
        if one
    ]
    result += [optimizer.site for optimizer in observation.optimizers if optimizer.site]
    result += [model.site for model in observation.models if model.site]
    return result


def files(observation: Observation) -> set[str]:
    """Return the user's files that have observed locations."""
    return {site.file for site in sites(observation) if os.path.isfile(site.file)}
