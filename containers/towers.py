"""Images: how the classes with a vision tower take them, and the features that replace the embeddings of image tokens.

A `Tower` states, for one model type, the tensors that its forward takes and how many tokens each image has. It computes
no feature: `encode` calls the model's own `get_image_features`. `split` divides the tensors of a batch among its rows,
so that an image without a placeholder, or a placeholder without an image, is found before any work;
`forward_arguments` is its inverse, for a trainer's forward. Both leave values as they are.

M image tokens of a prompt of P tokens, E hidden size, F layers after which further features are added, B rows.
"""

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch.nn import functional

Tensors = Mapping[str, torch.Tensor]
IMAGE_WORDS = ("pixel", "image", "video", "vision", "mm_token", "second_per_grid")
"""Parts of the names of arguments that belong to images and videos."""


class ImageSize(NamedTuple):
    """The extent of one image."""

    num_entries: int
    """Entries along the first axis of `pixel_values`."""
    num_tokens: int


@dataclass(frozen=True, eq=False)
class ImageInputs:
    """The images of one prompt."""

    inputs: Tensors
    """Arguments of the model's forward for a batch of this row alone, on the host."""
    places: torch.Tensor
    """`[M]` int64: index of each image token in the prompt."""
    digest: bytes
    """Digest of `inputs`: the same tokens with other pixels are another prompt."""
    tower: "Tower"
    spans: tuple[tuple[int, int], ...] = ()
    """First and last token of each run of adjacent image tokens that see each other; empty if none do."""
    positions: torch.Tensor | None = None
    """`[3, P]` int64: position of each token on each axis of the rotary embedding; None: it has one axis."""

    @property
    def salt(self) -> bytes:
        """Bytes that prompts have in common if equal tokens at their beginning have equal keys and values."""
        return self.digest + self.places.numpy().tobytes()

    def whole(self, end: int) -> tuple[int, int]:
        """The nearest places at or before, and at or after, `end`, where a chunk may end: no span is cut."""
        for first, last in self.spans:
            if first < end <= last:
                return first, last + 1
        return end, end

    @property
    def shift(self) -> int:
        """Number that is added to the index of a later token for its position, on every axis."""
        return 0 if self.positions is None else int(self.positions.max()) + 1 - self.positions.shape[1]


@dataclass(frozen=True, kw_only=True)
class Tower:
    """How the models of one type take images."""

    inputs: tuple[str, ...]
    """Tensors with an entry for each image, `pixel_values` first, in the order of their placeholders."""
    sizes: Callable[[Any, Tensors], list[ImageSize]]
    """Sizes of the images of `inputs`, which is called with the model and a batch's tensors."""
    required: tuple[str, ...] = ()
    """Names of `inputs` that must be passed with `pixel_values`."""
    of_rows: tuple[str, ...] = ()
    """Optional tensors with an entry for each row of the batch."""
    token_types: str | None = None
    """Argument `[B, P]` that is 1 for image tokens; it must be passed with images. None: there is none."""
    sees_all: Callable[[Any], bool] = lambda model: False
    """Whether adjacent image tokens see each other, also those after them."""
    is_local: bool = False
    """Whether they do so in layers with a window alone."""
    is_by_row: bool = False
    """Whether the first axis of `inputs` is that of rows, the second one that of images, with zeros for no image."""
    trim: Callable[[Tensors], Tensors] = dict
    """Removes the padding from the tensors of one image."""


def _grids(model: Any, given: Tensors) -> list[ImageSize]:
    """A row of `pixel_values` is a patch; squares of patches become a token."""
    merged = model.config.vision_config.spatial_merge_size**2
    return [ImageSize(patches, patches // merged) for patches in given["image_grid_thw"].prod(-1).tolist()]


def _shuffled(model: Any, given: Tensors) -> list[ImageSize]:
    """Idefics 3: `pixel_values [B, n, C, H, W]`."""
    config = model.config
    height, width = (size // config.vision_config.patch_size for size in given["pixel_values"].shape[-2:])
    return [ImageSize(1, height * width // config.scale_factor**2)] * given["pixel_values"].shape[1]


def _tiles(model: Any, given: Tensors) -> list[ImageSize]:
    """InternVL: `pixel_values [n, C, H, W]`, of which several may be tiles of one image."""
    config = model.config
    height, width = (
        size // patch
        for size, patch in zip(given["pixel_values"].shape[-2:], _pair(config.vision_config.patch_size), strict=True)
    )
    return [ImageSize(1, int(height * width * config.downsample_ratio**2))] * len(given["pixel_values"])


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)  # type: ignore[return-value]


def _merged_patches(model: Any, given: Tensors) -> list[ImageSize]:
    """Mistral 3: images of any size, padded to the largest."""
    edge = model.config.vision_config.patch_size * model.config.spatial_merge_size
    return [ImageSize(1, (height // edge) * (width // edge)) for height, width in given["image_sizes"].tolist()]


def _cropped(given: Tensors) -> Tensors:
    ((height, width),) = given["image_sizes"].tolist()
    return {**given, "pixel_values": given["pixel_values"][..., :height, :width]}


def _any_resolution(model: Any, given: Tensors) -> list[ImageSize]:
    """LLaVA-OneVision: an image of a row of its own is cut into patches; the model's function packs their features."""
    config, inner = model.config, model.model
    counts = given.get("batch_num_images")
    is_cut = [True] * len(given["image_sizes"])
    if counts is not None:
        is_cut = [count == 1 for count in counts.tolist() for _ in range(count)]
    edge = config.vision_config.image_size // config.vision_config.patch_size
    newline = torch.empty(1, device="meta")
    sizes = []
    for size, cut in zip(given["image_sizes"], is_cut, strict=False):
        patches = _num_patches(config, size.tolist()) if cut else 1
        features = [torch.empty(patches, edge**2, 1, device="meta")]
        packed, _ = inner.pack_image_features(
            features, size[None], image_newline=newline, vision_aspect_ratio=config.vision_aspect_ratio
        )
        sizes.append(ImageSize(1, len(packed[0])))
    return sizes


def _num_patches(config: Any, size: list[int]) -> int:
    from transformers.image_processing_utils import select_best_resolution

    height, width = select_best_resolution(size, config.image_grid_pinpoints)
    edge = config.vision_config.image_size
    return 1 + -(-height // edge) * -(-width // edge)


def _fixed(name: str) -> Callable[[Any, Tensors], list[ImageSize]]:
    """Every image has as many tokens as the config says under `name`."""
    return lambda model, given: [ImageSize(1, getattr(model.config, name))] * len(given["pixel_values"])


def _pooled_patches(model: Any, given: Tensors) -> list[ImageSize]:
    """Gemma 4: `pixel_values [n, patches, ...]`, with the position -1 for padding."""
    num_patches = (given["image_position_ids"] != -1).all(-1).sum(-1).tolist()
    pooled = model.config.vision_config.pooling_kernel_size**2
    return [ImageSize(1, number // pooled) for number in num_patches]


def _is_bidirectional(model: Any) -> bool:
    return getattr(model.config.get_text_config(), "use_bidirectional_attention", None) == "vision"


_QWEN_VL = Tower(
    inputs=("pixel_values", "image_grid_thw"),
    sizes=_grids,
    required=("image_grid_thw",),
    token_types="mm_token_type_ids",
)
_IDEFICS3 = Tower(inputs=("pixel_values", "pixel_attention_mask"), sizes=_shuffled, is_by_row=True)
TOWERS = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN_VL),
    **dict.fromkeys(("idefics3", "smolvlm"), _IDEFICS3),
    "gemma3": Tower(
        inputs=("pixel_values",),
        sizes=_fixed("mm_tokens_per_image"),
        token_types="token_type_ids",
        sees_all=lambda model: True,
    ),
    "gemma4": Tower(
        inputs=("pixel_values", "image_position_ids"),
        sizes=_pooled_patches,
        required=("image_position_ids",),
        token_types="mm_token_type_ids",
        sees_all=_is_bidirectional,
        is_local=True,
    ),
    "internvl": Tower(inputs=("pixel_values",), sizes=_tiles),
    "mistral3": Tower(
        inputs=("pixel_values", "image_sizes"), sizes=_merged_patches, required=("image_sizes",), trim=_cropped
    ),
    "llava_onevision": Tower(
        inputs=("pixel_values", "image_sizes"),
        sizes=_any_resolution,
        required=("image_sizes",),
        of_rows=("batch_num_images",),
    ),
}
"""Towers by model type; models of another type generate from images by their own `generate()`."""


def find_tower(model: Any, has_axes: bool) -> Tower | None:
    """Returns how `model`, not wrapped by peft, takes images; None if it is not known.

    `has_axes`: whether the containers' rotary embedding can have three axes, which some models need.
    """
    tower = TOWERS.get(getattr(model.config, "model_type", ""))
    if tower is None or not hasattr(model, "get_image_features"):
        return None
    return tower if has_axes or not has_rope_index(model) else None


def has_rope_index(model: Any) -> bool:
    """Whether a token of an image has a position on each of three axes, by a function of the model."""
    return hasattr(getattr(model, "model", None), "get_rope_index")


def image_token(model: Any) -> int | None:
    """The id of the token that stands for an image's features in the ids of a prompt."""
    return getattr(model.config, "image_token_id", None)


def names_of(tower: Tower) -> tuple[str, ...]:
    """Names of all arguments of images, those of tokens included."""
    return (*tower.inputs, *tower.of_rows, *((tower.token_types,) if tower.token_types else ()))


def split(model: Any, tower: Tower, given: Tensors, prompts: Sequence[Sequence[int]]) -> list[ImageInputs | None]:
    """Divides the images of a batch, as the processor of `model` returns them, among its `prompts`.

    Args:
        given: arguments of the model's forward by name, without None.
        prompts: the token ids of each row, without padding.

    Raises:
        ValueError: an argument is missing or has another form; a row's placeholders and images differ.
    """
    token = image_token(model)
    places = [torch.tensor([i for i, t in enumerate(prompt) if t == token], dtype=torch.int64) for prompt in prompts]
    pixels = {name: given[name].detach().cpu() for name in (*tower.inputs, *tower.of_rows) if name in given}
    if not pixels:
        _check_no_placeholder(places, token)
        return [None] * len(prompts)
    _check_arguments(tower, given, len(prompts))
    rows = _rows_of(model, tower, pixels, places)
    return [
        None if not row else _image_inputs(model, tower, row, prompt, where)
        for row, prompt, where in zip(rows, prompts, places, strict=True)
    ]


def _check_no_placeholder(places: list[torch.Tensor], token: int | None) -> None:
    for row, where in enumerate(places):
        if len(where):
            raise ValueError(
                f"input_ids, row {row}: {len(where)} image tokens (id {token}) and no image; pass pixel_values and "
                "what else the processor returns, or take the tokens out"
            )


def _check_arguments(tower: Tower, given: Tensors, num_rows: int) -> None:
    for name in ("pixel_values", *tower.required, *((tower.token_types,) if tower.token_types else ())):
        if name not in given:
            raise ValueError(f"{name} is missing; pass all that the model's processor returns with an image")
    for name in (*tower.of_rows, *(tower.inputs if tower.is_by_row else ())):
        if name in given and len(given[name]) != num_rows:
            raise ValueError(f"{name} has {len(given[name])} rows for {num_rows} prompts; pass one for each")


def _rows_of(model: Any, tower: Tower, pixels: Tensors, places: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Returns the tensors of each row's images, an empty dict for a row without."""
    if tower.is_by_row:
        rows = [
            _real_images({name: tensor[row : row + 1] for name, tensor in pixels.items()}) for row in range(len(places))
        ]
        for row, (of_row, where) in enumerate(zip(rows, places, strict=True)):
            _check_tokens(row, len(where), sum(size.num_tokens for size in tower.sizes(model, of_row)) if of_row else 0)
        return rows
    sizes = tower.sizes(model, pixels)
    num_entries, expected = len(pixels["pixel_values"]), sum(size.num_entries for size in sizes)
    if num_entries != expected:
        raise ValueError(
            f"pixel_values has {num_entries} entries and its images {expected}, by {', '.join(tower.inputs[1:])}; pass "
            "them as the model's processor returns them"
        )
    images = _images_of(tower, pixels, sizes)
    rows, taken = [], 0
    for row, where in enumerate(places):
        first, num_tokens = taken, 0
        while num_tokens < len(where) and taken < len(images):
            num_tokens += sizes[taken].num_tokens
            taken += 1
        _check_tokens(row, len(where), num_tokens)
        own = pad_and_join(images[first:taken])
        if own:
            own |= {name: torch.tensor([taken - first]) for name in tower.of_rows if name in pixels}
        rows.append(own)
    if taken < len(images):
        raise ValueError(
            f"pixel_values has {len(images)} images and the rows have placeholders for {taken}; each image needs its "
            "image tokens in input_ids, as the processor writes them"
        )
    return rows


def _check_tokens(row: int, num_placeholders: int, num_tokens: int) -> None:
    if num_placeholders != num_tokens:
        raise ValueError(
            f"input_ids, row {row}: {num_placeholders} image tokens, and its images have {num_tokens}; make ids and "
            "pixels by one call of the model's processor, and do not cut the ids"
        )


def _real_images(given: Tensors) -> dict[str, torch.Tensor]:
    """The tensors `[1, n, ...]` of one row without images that are all zero; empty if all are."""
    is_real = (given["pixel_values"][0] != 0).flatten(1).any(1)
    return {name: tensor[:, is_real] for name, tensor in given.items()} if bool(is_real.any()) else {}


def _images_of(tower: Tower, pixels: Tensors, sizes: list[ImageSize]) -> list[Tensors]:
    """The tensors of each image, without padding."""
    entries = {"pixel_values": [size.num_entries for size in sizes]}
    parts = {name: pixels[name].split(entries.get(name, [1] * len(sizes))) for name in tower.inputs if name in pixels}
    return [tower.trim({name: part[i] for name, part in parts.items()}) for i in range(len(sizes))]


def _image_inputs(
    model: Any, tower: Tower, inputs: Tensors, prompt: Sequence[int], places: torch.Tensor
) -> ImageInputs:
    digest = blake2b(digest_size=16)
    for name, tensor in sorted(inputs.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    spans = _runs(places) if tower.sees_all(model) else ()
    return ImageInputs(inputs, places, digest.digest(), tower, spans, axis_positions(model, inputs, prompt, places))


def _runs(places: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """The first and the last of each run of adjacent places."""
    starts = [0, *((places.diff() > 1).nonzero().flatten() + 1).tolist(), len(places)]
    return tuple((int(places[a]), int(places[b - 1])) for a, b in itertools.pairwise(starts))


def axis_positions(model: Any, inputs: Tensors, prompt: Sequence[int], places: torch.Tensor) -> torch.Tensor | None:
    """Returns the positions `[3, P]` of a prompt's tokens by the model's own rule; None if it has one axis."""
    if not has_rope_index(model):
        return None
    types = torch.zeros(1, len(prompt), dtype=torch.int64)
    types[0, places] = 1
    grids = {name: tensor for name, tensor in inputs.items() if name != "pixel_values"}
    positions, _ = model.model.get_rope_index(torch.tensor(prompt)[None], mm_token_type_ids=types, **grids)
    return positions[:, 0]


def forward_arguments(images: Sequence[ImageInputs | None], attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns what the model's forward takes in addition to tokens and their mask, for rows with these images.

    Args:
        images: of each row's prompt.
        attention_mask: `[B, W]` on the host, 1 on tokens; each row is its prompt, then an answer.

    Returns:
        Tensors on the host: the images, which tokens are theirs, and `position_ids [3, B, W]` if the rotary embedding
        has three axes; empty if no row has an image.
    """
    some = next((row for row in images if row is not None), None)
    if some is None:
        return {}
    arguments = _join(some.tower, images)
    first = attention_mask.argmax(1)
    if some.tower.token_types is not None:
        types = torch.zeros_like(attention_mask)
        for row, own in enumerate(images):
            if own is not None:
                types[row, first[row] + own.places] = 1
        arguments[some.tower.token_types] = types
    if some.positions is not None:
        arguments["position_ids"] = _row_positions(images, attention_mask, first)
    return arguments


def _row_positions(
    images: Sequence[ImageInputs | None], attention_mask: torch.Tensor, first: torch.Tensor
) -> torch.Tensor:
    """`[3, B, W]` int64, 0 or more on padding."""
    index = (attention_mask.cumsum(1) - 1).clamp(min=0)
    positions = index.expand(3, -1, -1).clone()
    for row, own in enumerate(images):
        if own is not None and own.positions is not None:
            start, end = int(first[row]), int(first[row]) + own.positions.shape[1]
            positions[:, row, start:end] = own.positions
            positions[:, row, end:] += own.shift
    return positions.clamp(min=0)


def _join(tower: Tower, rows: Iterable[ImageInputs | None]) -> dict[str, torch.Tensor]:
    """Joins the images of rows, at least one, into the tensors of a batch."""
    of_rows = [{} if row is None else row.inputs for row in rows]
    if tower.is_by_row:
        some = next(row for row in of_rows if row)
        none = {name: torch.zeros_like(tensor[:, :1]) for name, tensor in some.items()}
        of_rows = [row or none for row in of_rows]
    return pad_and_join([row for row in of_rows if row])


def pad_and_join(parts: Sequence[Tensors]) -> dict[str, torch.Tensor]:
    """Concatenates the tensors of each name along the first axis, padded with zeros at the end of the other axes."""
    joined = {}
    for name in parts[0] if parts else ():
        tensors = [part[name] for part in parts]
        shape = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
        joined[name] = torch.cat([_padded(tensor, shape) for tensor in tensors])
    return joined


def _padded(tensor: torch.Tensor, shape: list[int]) -> torch.Tensor:
    missing = [size - own for size, own in zip(shape, tensor.shape[1:], strict=True)]
    sides = [side for number in reversed(missing) for side in (0, number)]
    return functional.pad(tensor, sides) if any(missing) else tensor


def feature_width(model: Any) -> int:
    """Columns of the features of `encode`, E (1 + F)."""
    further = getattr(model.config.vision_config, "deepstack_visual_indexes", None) or ()
    return model.config.get_text_config().hidden_size * (1 + len(further))


def encode(model: Any, images: ImageInputs, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Returns the features `[M, E (1 + F)]` of a prompt's image tokens by the model's own tower and projector.

    The model's weights must be whole. Columns past E are added to the hidden state after each of the first F layers.
    """
    known = inspect.signature(model.get_image_features).parameters
    given = {name: tensor.to(device) for name, tensor in images.inputs.items() if name in known}
    found = model.get_image_features(**given, return_dict=True)
    rows = torch.cat([part.reshape(-1, part.shape[-1]) for part in found.pooler_output])
    further = [torch.cat(list(level)) for level in getattr(found, "deepstack_features", None) or ()]
    features = torch.cat([rows, *further], dim=1).to(dtype)
    assert len(features) == len(images.places), f"{len(features)=} {len(images.places)=}"
    return features
