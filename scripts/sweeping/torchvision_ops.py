"""Torchvision where its compiled library does not load (a wheel for GPUs beside torch for CPUs): the ops that it would
define, of which models need two, in Python."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from torch import Tensor

OPS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align": "(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
    "qroi_align": "(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
    "_roi_align_backward": "(Tensor grad, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "SymInt batch_size, SymInt channels, SymInt height, SymInt width, int sampling_ratio, bool aligned) -> Tensor",
    "roi_pool": "(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width) "
    "-> (Tensor, Tensor)",
    "_roi_pool_backward": "(Tensor grad, Tensor rois, Tensor argmax, float spatial_scale, SymInt pooled_height, "
    "SymInt pooled_width, SymInt batch_size, SymInt channels, SymInt height, SymInt width) -> Tensor",
    "ps_roi_align": "(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio) -> (Tensor, Tensor)",
    "_ps_roi_align_backward": "(Tensor grad, Tensor rois, Tensor channel_mapping, float spatial_scale, "
    "SymInt pooled_height, SymInt pooled_width, int sampling_ratio, SymInt batch_size, SymInt channels, SymInt height, "
    "SymInt width) -> Tensor",
    "ps_roi_pool": "(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width) "
    "-> (Tensor, Tensor)",
    "_ps_roi_pool_backward": "(Tensor grad, Tensor rois, Tensor channel_mapping, float spatial_scale, "
    "SymInt pooled_height, SymInt pooled_width, SymInt batch_size, SymInt channels, SymInt height, SymInt width) "
    "-> Tensor",
    "deform_conv2d": "(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, "
    "SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, "
    "SymInt offset_groups, bool use_mask) -> Tensor",
    "_deform_conv2d_backward": "(Tensor grad, Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, "
    "SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, "
    "SymInt groups, SymInt offset_groups, bool use_mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
}
"""The ops that torchvision's Python describes, with the schemas of its library."""


def ready() -> None:
    """Make torchvision importable; :class:`ImportError` where it is not installed."""
    found = importlib.util.find_spec("torchvision")
    if found is None or not found.submodule_search_locations:
        raise ImportError("torchvision is not installed")
    if hasattr(torch.ops.torchvision, "nms") or loads(found.submodule_search_locations[0]):
        return
    for name, schema in OPS.items():
        torch.library.define(f"torchvision::{name}", schema)
    torch.library.impl("torchvision::nms", "CPU", nms)
    import torchvision.ops.boxes

    torchvision.ops.boxes._assert_has_ops = lambda: None  # its nms needs the op alone, which there is now


def loads(folder: str) -> bool:
    """Return whether the compiled library in a folder loads."""
    for path in Path(folder).glob("_C*.so"):
        try:
            torch.ops.load_library(path)
        except OSError:
            return False
        return True
    return False


def nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Return the boxes that stay, by falling scores: none overlaps one before it by more than ``threshold``."""
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    low = torch.maximum(boxes[:, None, :2], boxes[None, :, :2])
    high = torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    overlap = shared / (area[:, None] + area[None] - shared)
    kept: list[int] = []
    for one in scores.argsort(descending=True, stable=True).tolist():
        if not kept or float(overlap[one, kept].max()) <= threshold:
            kept.append(one)
    return torch.tensor(kept, dtype=torch.long, device=boxes.device)
