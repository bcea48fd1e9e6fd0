"""The documentation of a dataclass's fields, which Python itself drops: the string below each of them."""

import ast
import inspect
import textwrap


def field_meanings(config_class: type) -> dict[str, str]:
    """The string below each field of a dataclass, by the field's name, read from its source."""
    definition = ast.parse(textwrap.dedent(inspect.getsource(config_class))).body[0]
    assert isinstance(definition, ast.ClassDef), config_class
    meanings = {}
    for node, following in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(following, ast.Expr):
            meanings[node.target.id] = inspect.cleandoc(ast.literal_eval(following.value))
    return meanings
