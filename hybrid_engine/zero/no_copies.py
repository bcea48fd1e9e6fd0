"""What an engine refuses to have done to it: copies, pickles and casts, which would leave masters and shards behind."""

from typing import Any, NoReturn

import torch
from torch import nn

from hybrid_engine.config import EngineConfig

_OPTIONS = {torch.float16: "fp16.enabled", torch.bfloat16: "bf16.enabled"}


class Uncopied(nn.Module):
    """A module that is neither copied nor pickled, and whose dtype is its config's for good."""

    config: EngineConfig

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise ValueError(
            f"copy.deepcopy: a {type(self).__name__} is not copied, as its masters and shards belong to the model it "
            f"was given; copy engine.module, or initialize() another model and load_checkpoint() there"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ValueError(
            f"pickle: a {type(self).__name__} is not pickled; save_checkpoint() keeps everything, and "
            f"save_16bit_model() or engine.module.state_dict() the weights"
        )

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """nn.Module's for devices; raises ValueError for another dtype than the parameters have."""
        _, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is not None:
            self._check_dtype("to()", dtype)
        return super().to(*args, **kwargs)

    def float(self) -> Any:
        """Raises ValueError unless the parameters are in fp32."""
        self._check_dtype("float()", torch.float32)
        return self

    def double(self) -> Any:
        """Raises ValueError: no engine has that dtype."""
        self._check_dtype("double()", torch.float64)
        return self

    def half(self) -> Any:
        """Raises ValueError unless the parameters are in fp16."""
        self._check_dtype("half()", torch.float16)
        return self

    def bfloat16(self) -> Any:
        """Raises ValueError unless the parameters are in bf16."""
        self._check_dtype("bfloat16()", torch.bfloat16)
        return self

    def type(self, dst_type: Any) -> Any:  # type: ignore[override]
        """Raises ValueError unless the parameters have that dtype."""
        self._check_dtype("type()", dst_type)
        return self

    def _check_dtype(self, what: str, dtype: Any) -> None:
        if dtype == self.config.dtype:
            return
        option = _OPTIONS.get(dtype)
        remedy = f'set "{option}" in the config of initialize()' if option else "leave it out"
        raise ValueError(
            f"{what}: {dtype} is not the dtype of this engine, {self.config.dtype}, which its config chose for the "
            f"parameters and their masters; {remedy}"
        )
