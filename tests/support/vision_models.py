"""Small random models of each type with a vision tower, and batches of images as their processors would make them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf

VOCAB, PAD, IMAGE = 60, 0, 50
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": PAD}
_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    **_IDS,
}
_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}


@dataclass(frozen=True)
class Images:
    """The tensors of images for a batch, and the number of image tokens of each image of each row."""

    inputs: dict[str, torch.Tensor]
    num_tokens: list[list[int]]


def _pixels(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _idefics3(counts: list[int]) -> Images:
    """16 x 16 pixels, patches of 4, of which 2 x 2 are a token: 4 tokens each; rows padded with images of zeros."""
    pixels = _pixels(len(counts), max(counts), 3, 16, 16)
    mask = torch.ones(len(counts), max(counts), 16, 16, dtype=torch.int64)
    for row, count in enumerate(counts):
        pixels[row, count:] = 0
        mask[row, count:] = 0
    return Images({"pixel_values": pixels, "pixel_attention_mask": mask}, [[4] * count for count in counts])


def _internvl(counts: list[int]) -> Images:
    """16 x 16 pixels, patches of 4, of which 2 x 2 are a token; every second image has two tiles."""
    tiles = [[1 + index % 2 for index in range(count)] for count in counts]
    inputs = {"pixel_values": _pixels(sum(map(sum, tiles)), 3, 16, 16)}
    return Images(inputs, [[4 * number for number in row] for row in tiles])


def _sizes(counts: list[int]) -> list[list[tuple[int, int]]]:
    """Heights and widths in units, different from image to image."""
    return [[(1 + (row + index) % 3, 2 + index % 2) for index in range(count)] for row, count in enumerate(counts)]


def _mistral3(counts: list[int]) -> Images:
    """Images of multiples of 8 pixels, patches of 4, of which 2 x 2 are a token."""
    sizes = _sizes(counts)
    flat = [size for row in sizes for size in row]
    pixels = torch.zeros(len(flat), 3, 24, 24)
    for image, (height, width) in enumerate(flat):
        pixels[image, :, : 8 * height, : 8 * width] = _pixels(3, 8 * height, 8 * width)
    inputs = {"pixel_values": pixels, "image_sizes": torch.tensor(flat) * 8}
    return Images(inputs, [[height * width for height, width in row] for row in sizes])


def _llava_onevision(counts: list[int]) -> Images:
    """Tiles of 16 x 16 pixels and 16 tokens; a row's only image is cut into up to 4 tiles and a small whole one."""
    sizes, patches, num_tokens = [], [], []
    for count in counts:
        if count != 1:
            sizes += [(16, 16)] * count
            patches += [1] * count
            num_tokens.append([17] * count)  # a token at the end of each image
            continue
        sizes.append((32, 16) if len(sizes) % 2 else (32, 32))
        patches.append(3 if sizes[-1] == (32, 16) else 5)
        height, width = (edge // 4 for edge in sizes[-1])
        num_tokens.append([16 + height * (width + 1)])  # a token at the end of each line
    pixels = _pixels(len(sizes), 5, 3, 16, 16)
    for image, number in enumerate(patches):
        pixels[image, number:] = 0
    counted = torch.tensor(counts)
    return Images({"pixel_values": pixels, "image_sizes": torch.tensor(sizes), "batch_num_images": counted}, num_tokens)


def _qwen(patch_values: int) -> Callable[[list[int]], Images]:
    """A token is 2 x 2 patches."""

    def make(counts: list[int]) -> Images:
        sizes = _sizes(counts)
        grids = torch.tensor([(1, 2 * height, 2 * width) for row in sizes for height, width in row])
        inputs = {"pixel_values": _pixels(int(grids.prod(1).sum()), patch_values), "image_grid_thw": grids}
        return Images(inputs, [[height * width for height, width in row] for row in sizes])

    return make


def idefics3(name: str = "Idefics3") -> Any:
    vision = {**_SIGLIP, "model_type": f"{name.lower()}_vision"}
    config = getattr(hf, f"{name}Config")(
        text_config={"model_type": "llama", **_TEXT}, vision_config=vision, image_token_id=IMAGE, scale_factor=2, **_IDS
    )
    return getattr(hf, f"{name}ForConditionalGeneration")(config)


def internvl() -> Any:
    vision = {**_SIGLIP, "model_type": "internvl_vision", "image_size": [16, 16], "patch_size": [4, 4]}
    text = {"model_type": "qwen2", **_TEXT}
    config = hf.InternVLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE, image_seq_length=4)
    return hf.InternVLForConditionalGeneration(config)


def mistral3() -> Any:
    vision = {**_SIGLIP, "model_type": "pixtral", "image_size": 32, "head_dim": 8}
    text = {"model_type": "mistral", "head_dim": 8, "sliding_window": None, **_TEXT}
    config = hf.Mistral3Config(text_config=text, vision_config=vision, image_token_index=IMAGE, spatial_merge_size=2)
    return hf.Mistral3ForConditionalGeneration(config)


def llava_onevision() -> Any:
    config = hf.LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **_TEXT},
        vision_config={**_SIGLIP, "vision_use_head": False},
        image_token_index=IMAGE,
        video_token_index=IMAGE + 1,
        image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]],
    )
    return hf.LlavaOnevisionForConditionalGeneration(config)


_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": IMAGE + 1,
    "vision_start_token_id": IMAGE + 2,
    "vision_end_token_id": IMAGE + 3,
}


def qwen2_vl() -> Any:
    vision = {"embed_dim": 16, "depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
    config = hf.Qwen2VLConfig(text_config={**_TEXT, "rope_parameters": MROPE}, vision_config=vision, **_TOKENS)
    return hf.Qwen2VLForConditionalGeneration(config)


def qwen2_5_vl() -> Any:
    vision = {"hidden_size": 16, "out_hidden_size": 32, "depth": 2, "num_heads": 2, "patch_size": 4}
    vision |= {"intermediate_size": 16, "fullatt_block_indexes": [1], "window_size": 16}
    config = hf.Qwen2_5_VLConfig(text_config={**_TEXT, "rope_parameters": MROPE}, vision_config=vision, **_TOKENS)
    return hf.Qwen2_5_VLForConditionalGeneration(config)


_QWEN3_VISION = {
    "hidden_size": 16,
    "out_hidden_size": 32,
    "depth": 3,
    "num_heads": 2,
    "patch_size": 4,
    "intermediate_size": 16,
    "num_position_embeddings": 16,
}


def qwen3_vl() -> Any:
    text = {**_TEXT, "head_dim": 8, "rope_parameters": MROPE}
    vision = {**_QWEN3_VISION, "deepstack_visual_indexes": [0, 2]}
    config = hf.Qwen3VLConfig(text_config=text, vision_config=vision, **_TOKENS)
    return hf.Qwen3VLForConditionalGeneration(config)


def qwen3_5() -> Any:
    text = {**_TEXT, "head_dim": 16, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    text |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    text["rope_parameters"] = {**MROPE, "partial_rotary_factor": 0.5}
    config = hf.Qwen3_5Config(text_config=text, vision_config=_QWEN3_VISION, **_TOKENS)
    return hf.Qwen3_5ForConditionalGeneration(config)


def _gemma3(counts: list[int]) -> Images:
    """16 x 16 pixels, patches of 4, averaged to 4 tokens."""
    return Images({"pixel_values": _pixels(sum(counts), 3, 16, 16)}, [[4] * count for count in counts])


def _gemma4(counts: list[int]) -> Images:
    """Up to 4 x 4 patches of 4 x 4 pixels, of which 2 x 2 are averaged to a token."""
    sizes = [(2, 1 + index % 2) for index in range(sum(counts))]
    positions = torch.full((len(sizes), 16, 2), -1)
    for image, (width, height) in enumerate(sizes):
        grid = torch.cartesian_prod(torch.arange(2 * height), torch.arange(2 * width)).flip(1)
        positions[image, : len(grid)] = grid
    pixels = _pixels(len(sizes), 16, 48).sigmoid() * (positions[..., :1] >= 0)
    numbers = iter(width * height for width, height in sizes)
    inputs = {"pixel_values": pixels, "image_position_ids": positions}
    return Images(inputs, [[next(numbers) for _ in range(count)] for count in counts])


_GEMMA = {**_TEXT, "head_dim": 8, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"] * 2}
_GEMMA["num_hidden_layers"] = 4


def gemma3() -> Any:
    config = hf.Gemma3Config(
        text_config=_GEMMA, vision_config=_SIGLIP, mm_tokens_per_image=4, image_token_index=IMAGE,
        boi_token_index=IMAGE + 1, eoi_token_index=IMAGE + 2,
    )  # fmt: skip
    return hf.Gemma3ForConditionalGeneration(config)


def gemma4(attention: str | None) -> Any:
    text = {**_GEMMA, "global_head_dim": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
    vision = {k: v for k, v in _SIGLIP.items() if k not in ("model_type", "image_size")}
    vision |= {"head_dim": 8, "num_key_value_heads": 2, "position_embedding_size": 16, "pooling_kernel_size": 2}
    config = hf.Gemma4Config(
        text_config={**text, "use_bidirectional_attention": attention, "num_kv_shared_layers": 2},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=IMAGE + 1,
        audio_token_id=IMAGE + 2,
    )
    return hf.Gemma4ForConditionalGeneration(config)


FAMILIES: dict[str, tuple[Callable[[], Any], Callable[[list[int]], Images]]] = {
    "idefics3": (idefics3, _idefics3),
    "smolvlm": (lambda: idefics3("SmolVLM"), _idefics3),
    "internvl": (internvl, _internvl),
    "mistral3": (mistral3, _mistral3),
    "llava-onevision": (llava_onevision, _llava_onevision),
    "qwen2-vl": (qwen2_vl, _qwen(3 * 2 * 16)),
    "qwen2.5-vl": (qwen2_5_vl, _qwen(3 * 2 * 16)),
    "qwen3-vl": (qwen3_vl, _qwen(3 * 2 * 16)),
    "gemma3": (gemma3, _gemma3),
    "gemma4": (lambda: gemma4(None), _gemma4),
    "gemma4-bidirectional": (lambda: gemma4("vision"), _gemma4),
    "qwen3.5": (qwen3_5, _qwen(3 * 2 * 16)),
}


def build(name: str) -> Any:
    """The model of this name, with weights large enough that an image changes the answer."""
    torch.manual_seed(0)
    model = FAMILIES[name][0]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return model


def batch(name: str, counts: list[int]) -> dict[str, torch.Tensor]:
    """Prompts with `counts[row]` images, padded on the left, and their images: arguments of `generate()`."""
    images = FAMILIES[name][1](counts) if any(counts) else Images({}, [[] for _ in counts])
    generator = torch.Generator().manual_seed(1)

    def text(length: int) -> list[int]:
        return torch.randint(3, IMAGE - 1, (length,), generator=generator).tolist()

    rows = []
    for row, numbers in enumerate(images.num_tokens):
        ids = text(2 + row)
        for number in numbers:
            ids += [IMAGE] * number + text(1 + row % 2)
        rows.append(ids + text(2))
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    made = {"input_ids": ids, "attention_mask": mask, **images.inputs}
    types = {"qwen": "mm_token_type_ids", "gemma4": "mm_token_type_ids", "gemma3": "token_type_ids"}
    made |= {key: (ids == IMAGE).long() for start, key in types.items() if name.startswith(start)}
    return made
