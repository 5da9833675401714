"""Merges YAML files and `key.sub=value` overrides into one tree of PyYAML nodes.

A file may extend another with `base: FILE`, a path relative to itself or the name of a file that
ships with the project. Mappings merge key by key; any other value is replaced. The `start_mark` of
a node has the file and line it comes from. This module knows no types and no keys but `base`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import yaml

from selfplay.config.secrets import hidden, names_key
from selfplay.config.shipped import find_settings, nearest_settings
from selfplay.errors import SettingsError

NULL = "tag:yaml.org,2002:null"
_OVERRIDE = "override "  # prefix of a mark's name if the node comes from the command line
# Limits of the input: far above what settings need, and read within a second.
_MAX_BYTES, _MAX_DEPTH, _MAX_NODES = 1_000_000, 32, 10_000


def _compose(text: str, name: str) -> yaml.Node | None:
    """Parse YAML into nodes, which keep their file and line. None for an empty text."""
    try:
        loader = yaml.SafeLoader(text)
        loader.name = name
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = place(mark) if mark else name
        raise SettingsError(f"{where}: not valid YAML: {error.problem}") from None
    except yaml.reader.ReaderError as error:
        raise SettingsError(
            f"{name}: not valid YAML: {error.reason} (character {error.position})"
        ) from None
    except RecursionError:
        raise SettingsError(_too_deep(name)) from None
    if node is not None:
        _check_size(node, name, above=[], count=0)
        _refuse_duplicates(node, set())
    return node


def _too_deep(where: str) -> str:
    return f"{where}: settings must be nested at most {_MAX_DEPTH} deep, got more"


def _check_size(node: yaml.Node, name: str, *, above: list[yaml.Node], count: int) -> int:
    """`count` plus the number of nodes below `node`, with aliases expanded.

    Raises SettingsError for too many nodes, too deep a nesting, or a node that contains itself.
    """
    if any(node is other for other in above):
        raise SettingsError(f"{place(node.start_mark)}: an anchor must not contain its own alias")
    if len(above) >= _MAX_DEPTH:
        raise SettingsError(_too_deep(place(node.start_mark)))
    count += 1
    if count > _MAX_NODES:
        raise SettingsError(
            f"{name}: settings must have at most {_MAX_NODES} values, aliases expanded, got more"
        )
    if isinstance(node, yaml.ScalarNode):
        return count
    children = node.value
    if isinstance(node, yaml.MappingNode):
        children = [part for pair in node.value for part in pair]
    for child in children:
        count = _check_size(child, name, above=[*above, node], count=count)
    return count


def _refuse_duplicates(node: yaml.Node, visited: set[int]) -> None:
    """Raise SettingsError for a key given twice; YAML would silently keep the last one."""
    if id(node) in visited or isinstance(node, yaml.ScalarNode):
        return
    visited.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            _refuse_duplicates(child, visited)
        return
    lines: dict[str, int] = {}
    for name, child in node.value:
        if not isinstance(name, yaml.ScalarNode):
            raise SettingsError(f"{place(name.start_mark)}: a key must be plain text")
        line = name.start_mark.line + 1
        if name.value in lines:
            raise SettingsError(
                f"{place(name.start_mark)}: {name.value} is given twice, "
                f"first on line {lines[name.value]}"
            )
        lines[name.value] = line
        _refuse_duplicates(child, visited)


def load_tree(
    path: Path | None,
    overrides: Sequence[str],
    shorts: Mapping[str, str | None],
    sections: Collection[str] = (),
) -> yaml.MappingNode:
    """The tree of a file (None: an empty tree) with its overrides applied in order.

    `shorts` maps a top-level section to the key that takes a plain value given to the section.
    `sections` are the dotted names of the sections that are always there.
    """
    tree = empty("defaults") if path is None else _read(find_settings(Path(path)), shorts, sections)
    for text in overrides:
        merged = merge(tree, _expand_shorts(override(text), shorts), sections)
        tree = yaml.MappingNode(merged.tag, merged.value, tree.start_mark, tree.end_mark)
    return tree


def _read(
    path: Path,
    shorts: Mapping[str, str | None],
    sections: Collection[str],
    parents: tuple[Path, ...] = (),
) -> yaml.MappingNode:
    """The tree of a file, merged over the tree of its `base` if it has one."""
    try:
        with path.open("rb") as file:  # bounded, because the path may be a pipe or a device
            data = file.read(_MAX_BYTES + 1)
        text = data.decode("utf-8")
    except FileNotFoundError:
        raise SettingsError(f"{path}: no such file{nearest_settings(path)}") from None
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from None
    if len(data) > _MAX_BYTES:
        raise SettingsError(f"{path}: a settings file must have at most {_MAX_BYTES} bytes")
    node = _compose(text, str(path)) or empty(str(path))
    if not isinstance(node, yaml.MappingNode):
        raise SettingsError(f"{place(node.start_mark)}: settings must be a mapping of keys")
    node = _expand_shorts(node, shorts)
    chain = (*parents, path.resolve())
    for index, (name, value) in enumerate(node.value):
        if name.value != "base":
            continue
        del node.value[index]
        if not isinstance(value, yaml.ScalarNode) or not value.value:
            raise SettingsError(f"{place(value.start_mark)}: base must be the name of a file")
        target = path.parent / value.value
        try:
            target = target if target.exists() else find_settings(Path(value.value))
            target.stat()
        except (OSError, ValueError) as error:
            raise SettingsError(
                f"{place(value.start_mark)}: base must be a file: {error}{nearest_settings(target)}"
            ) from None
        if target.resolve() in chain:
            raise SettingsError(
                f"{place(name.start_mark)}: base {value.value} leads back to itself"
            )
        return merge(_read(target, shorts, sections, chain), node, sections)
    return node


def override(text: str) -> yaml.MappingNode:
    """`a.b=value` as the tree of `a: {b: value}`; the value is read as YAML."""
    dotted, equals, value = text.partition("=")
    parts = dotted.strip().split(".")
    shown = f"{dotted}=…" if equals and names_key(dotted.strip()) else hidden(text)
    name = f"{_OVERRIDE}{shown!r}"
    if not equals or not all(parts):
        raise SettingsError(f"{name}: must read key=value or section.key=value")
    leaf = _compose(value, name) or yaml.ScalarNode(NULL, "", _mark(name))
    return _nest(parts, leaf, name)


def _expand_shorts(node: yaml.MappingNode, shorts: Mapping[str, str | None]) -> yaml.MappingNode:
    """The tree with `a: x` replaced by `a: {b: x}` for each section `a` with the short key `b`.

    A null value stays null.
    """
    pairs = []
    for name, value in node.value:
        short = shorts.get(name.value)
        if short and isinstance(value, yaml.ScalarNode) and value.tag != NULL:
            label = yaml.ScalarNode("tag:yaml.org,2002:str", short, value.start_mark)
            value = yaml.MappingNode(
                "tag:yaml.org,2002:map", [(label, value)], value.start_mark, value.end_mark
            )
        pairs.append((name, value))
    return yaml.MappingNode(node.tag, pairs, node.start_mark, node.end_mark)


def _nest(parts: Sequence[str], leaf: yaml.Node, name: str) -> yaml.MappingNode:
    tree = empty(name)
    label = yaml.ScalarNode("tag:yaml.org,2002:str", parts[0], _mark(name))
    tree.value.append((label, _nest(parts[1:], leaf, name) if parts[1:] else leaf))
    return tree


def merge(
    under: yaml.MappingNode,
    over: yaml.MappingNode,
    sections: Collection[str] = (),
    prefix: str = "",
) -> yaml.MappingNode:
    """A new tree: mappings merge key by key; any other value of `over` replaces that of `under`.

    Raises SettingsError if nothing would replace the values of one of `sections`.
    """
    merged = {name.value: (name, value) for name, value in under.value}
    for name, value in over.value:
        old = merged[name.value][1] if name.value in merged else None
        dotted = f"{prefix}{name.value}"
        if isinstance(old, yaml.MappingNode) and isinstance(value, yaml.MappingNode):
            value = merge(old, value, sections, f"{dotted}.")
        elif dotted in sections and isinstance(old, yaml.MappingNode) and value.tag == NULL:
            raise SettingsError(
                f"{place(name.start_mark)}: {dotted} must be a section, got nothing; remove the "
                f"key to keep what is set, or write {dotted.rpartition('.')[2]}: {{}}"
            )
        merged[name.value] = (name, value)
    return yaml.MappingNode(over.tag, list(merged.values()), over.start_mark, over.end_mark)


def place(mark: yaml.Mark) -> str:
    """`FILE:LINE`, or the override's text."""
    if mark.name.startswith(_OVERRIDE) or mark.name == "defaults":
        return str(mark.name)
    return f"{mark.name}:{mark.line + 1}"


def _mark(name: str) -> yaml.Mark:
    return yaml.Mark(name, 0, 0, 0, None, 0)


def empty(name: str) -> yaml.MappingNode:
    """A mapping without keys whose mark has the file name `name`."""
    return yaml.MappingNode("tag:yaml.org,2002:map", [], _mark(name), _mark(name))


def sources(node: yaml.Node) -> list[str]:
    """The distinct files and overrides that the values below `node` come from, in order."""
    if isinstance(node, yaml.MappingNode) and node.value:
        names = [source for _, child in node.value for source in sources(child)]
        return list(dict.fromkeys(names))
    return [str(node.start_mark.name)]


def rule_sources(node: yaml.Node, name: str, rule: str) -> list[str]:
    """The sources of those values below `node`, whose dotted key is `name`, that a rule's text
    names by their key or section. If it names none, the files; without files, all sources."""
    named = [source for part in _named(node, name, rule) for source in sources(part)]
    everything = sources(node)
    files = [source for source in everything if not source.startswith(_OVERRIDE)]
    return list(dict.fromkeys(named)) or files or everything


def _named(node: yaml.Node, name: str, rule: str) -> list[yaml.Node]:
    """The nodes at and below `node` that a rule's text names, the outermost ones."""
    if _is_named(name, rule):
        return [node]
    if not isinstance(node, yaml.MappingNode):
        return []
    parts = [(f"{name}.{key.value}" if name else key.value, value) for key, value in node.value]
    return [each for dotted, value in parts for each in _named(value, dotted, rule)]


def _is_named(name: str, rule: str) -> bool:
    home, _, last = name.rpartition(".")
    if name and (rule.startswith(f"{name} ") or f"{name}.*" in rule):
        return True
    # As the second key of "algorithm.kl_target, reference_every"; other plain words may be prose.
    shortened = "_" in last and f"{home}." in rule and _stands_in(rule, last)
    return bool(home) and (shortened or _stands_in(rule, name))


def _stands_in(text: str, name: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(name)}(?!\w|\.\w)", text) is not None
