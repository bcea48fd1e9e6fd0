"""`deepspeed.utils.z3_leaf_module`: modules that DeepSpeed gathers whole, whatever runs inside of them.

FSDP2 gathers whole layers, so nothing depends on the marks; they are kept for code that reads them again.
"""

from collections.abc import Callable, Sequence

from torch import nn

MODULE_MARK = "_z3_leaf"
PARAMETER_MARK = "ds_z3_leaf_module"


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Marks the modules of those classes, given also by name, and returns them; ValueError if there are none."""
    return _mark(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Takes the marks off the modules of those classes, and returns them; ValueError if there are none."""
    return _mark(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Marks the module `model` itself, or takes its mark off."""
    setattr(model, MODULE_MARK, flag)
    for param in model.parameters():
        setattr(param, PARAMETER_MARK, model if flag else None)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Marks modules by their names in `named_modules()`; returns them, and the names that there are not."""
    modules = dict(model.named_modules())
    return _mark_found(modules, module_names, lambda name, wanted: name == wanted, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Marks modules by the ends of their names in `named_modules()`; returns them, and the ends that there are not."""
    modules = dict(model.named_modules())
    return _mark_found(modules, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules of `model`."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether the module `model` is marked."""
    return bool(getattr(model, MODULE_MARK, False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Whether the parameter belonged to a marked module when that was marked.

    `initialize()` on several processes makes other parameters, so modules are to be marked after it for this.
    """
    return getattr(model, PARAMETER_MARK, None) is not None


def _mark(model: nn.Module, classes: Sequence[type | str], flag: bool, must_exist: bool) -> list[nn.Module]:
    found = [module for module in model.modules() if any(_is_of(module, kind) for kind in classes)]
    if must_exist and not found:
        raise ValueError(f"leaf_module_classes={list(classes)}: the model has no module of them; choose from its own")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _is_of(module: nn.Module, kind: type | str) -> bool:
    if isinstance(kind, str):
        own = type(module)
        return kind in (own.__name__, own.__qualname__, f"{own.__module__}.{own.__qualname__}")
    return isinstance(module, kind)


def _mark_found(
    modules: dict[str, nn.Module],
    wanted: Sequence[str],
    fits: Callable[[str, str], bool],
    flag: bool,
    must_exist: bool,
) -> tuple[list[nn.Module], list[str]]:
    found = [module for name, module in modules.items() if any(fits(name, entry) for entry in wanted)]
    missing = [entry for entry in wanted if not any(fits(name, entry) for name in modules)]
    if must_exist and missing:
        raise ValueError(f"the model has no modules of the names {missing}; see its named_modules()")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found, missing
