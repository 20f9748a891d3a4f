"""The zoo of torchvision: classification, video, segmentation and detection, at a fraction of their width."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sweeping.case import LABELS, Case, Draws, Entry, batches
from sweeping.narrow import narrowed
from sweeping.torchvision_ops import ready

FACTOR = 8
CONVOLUTIONAL: dict[str, dict[str, Any]] = {
    "alexnet": {},
    "densenet121": {},
    "efficientnet_b0": {},
    "efficientnet_v2_s": {},
    "googlenet": {"init_weights": False, "aux_logits": False},
    "inception_v3": {"size": 96, "init_weights": False, "aux_logits": False},
    "mnasnet0_5": {},
    "mobilenet_v2": {},
    "mobilenet_v3_small": {},
    "regnet_x_400mf": {},
    "regnet_y_400mf": {},
    "resnet18": {},
    "resnet50": {},
    "resnext50_32x4d": {},
    "shufflenet_v2_x0_5": {},
    "squeezenet1_1": {},
    "vgg11": {},
    "vgg11_bn": {},
    "wide_resnet50_2": {},
}
"""Nets of convolutions, with the size of their images where it is not 64, and arguments of theirs."""
ATTENTION = ("vit", "swin", "swin_v2", "maxvit", "convnext")
SEGMENTATION = ("deeplabv3_mobilenet_v3_large", "deeplabv3_resnet50", "fcn_resnet50", "lraspp_mobilenet_v3_large")
DETECTION = ("faster_rcnn", "mask_rcnn", "keypoint_rcnn", "retinanet", "fcos", "ssd")
VIDEO = ("mc3_18", "r2plus1d_18", "r3d_18", "s3d", "swin3d", "mvit")


def entries() -> Iterator[Entry]:
    """Return the models of torchvision; :class:`ImportError` where it is not installed."""
    ready()
    for name, given in CONVOLUTIONAL.items():
        yield Entry("torchvision", name, "image", lambda n=name, g=given: convolutional(n, **g))
    for name in ATTENTION:
        yield Entry("torchvision", name, "image", lambda n=name: classifier(attention(n), 3, 32, 32))
    for name in VIDEO:
        yield Entry("torchvision", name, "video", lambda n=name: video(n))
    for name in SEGMENTATION:
        yield Entry("torchvision", name, "segmentation", lambda n=name: segmentation(n))
    for name in DETECTION:
        yield Entry("torchvision", name, "detection", lambda n=name: detection(n))


def cross_entropy(output: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
    """Return the loss of a class for each row."""
    return F.cross_entropy(output, fields["label"])


def of_pixels(output: Mapping[str, Tensor], fields: Mapping[str, Tensor]) -> Tensor:
    """Return the loss of a class for each pixel."""
    return F.cross_entropy(output["out"], fields["label"])


class First(nn.Module):
    """A model of images under one name of its input."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Return what the model does, such as scores of classes, of shape (rows, classes)."""
        return self.model(x)


def classifier(model: nn.Module, *shape: int) -> Case:
    """Return a model that gives inputs of shape (rows, \\*shape) a class."""

    def batch(draws: Draws) -> dict[str, Tensor]:
        return {"x": draws.numbers(*shape), "label": draws.integers(0, LABELS)}

    return Case(First(model.float().train()), batches(batch), cross_entropy)


def convolutional(name: str, size: int = 64, **given: Any) -> Case:
    """Return a net of convolutions on images of shape (rows, 3, size, size)."""
    import torchvision.models as models

    torch.manual_seed(0)
    with narrowed(FACTOR):
        model = getattr(models, name)(weights=None, num_classes=LABELS, **given)
    return classifier(model, 3, size, size)


def attention(name: str) -> nn.Module:
    """Return a small model of a class whose width is an argument."""
    import torchvision.models as m
    from torchvision.models.convnext import CNBlockConfig
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2

    torch.manual_seed(0)
    swin: dict[str, Any] = {
        "patch_size": [4, 4],
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": [4, 4],
        "num_classes": LABELS,
    }
    makers: dict[str, Callable[[], nn.Module]] = {
        "vit": lambda: m.VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=LABELS),
        "swin": lambda: SwinTransformer(**swin),
        "swin_v2": lambda: SwinTransformer(**swin, block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2),
        "maxvit": lambda: m.MaxVit((32, 32), 8, 4, [8, 16], [1, 1], 4, 0.1, num_classes=LABELS),
        "convnext": lambda: m.ConvNeXt(
            [CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 2)], stochastic_depth_prob=0.1, num_classes=LABELS
        ),
    }
    return makers[name]()


def video(name: str) -> Case:
    """Return a model that gives videos, of shape (rows, 3, frames, height, width), a class."""
    import torchvision.models.video as m
    from torchvision.models.video.mvit import MSBlockConfig, MViT
    from torchvision.models.video.swin_transformer import SwinTransformer3d

    torch.manual_seed(0)
    if name == "swin3d":
        model = SwinTransformer3d([2, 4, 4], 16, [2, 2], [2, 4], [2, 4, 4], num_classes=LABELS)
        return classifier(model, 3, 4, 32, 32)
    if name == "mvit":
        blocks = [
            MSBlockConfig(1, 16, 32, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
            MSBlockConfig(2, 32, 32, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 1, 1]),
        ]
        model = MViT(
            (32, 32),
            4,
            blocks,
            residual_pool=True,
            residual_with_cls_embed=False,
            rel_pos_embed=True,
            proj_after_attn=True,
            num_classes=LABELS,
        )
        return classifier(model, 3, 4, 32, 32)
    size = (16, 224) if name == "s3d" else (4, 64)
    with narrowed(FACTOR):
        model = getattr(m, name)(weights=None, num_classes=LABELS)
    return classifier(model, 3, size[0], size[1], size[1])


def segmentation(name: str) -> Case:
    """Return a model that gives each pixel a class; some pixels are ignored."""
    import torchvision.models.segmentation as models

    torch.manual_seed(0)
    with narrowed(FACTOR):
        model = getattr(models, name)(weights=None, weights_backbone=None, num_classes=LABELS)

    def batch(draws: Draws) -> dict[str, Tensor]:
        label = draws.integers(0, LABELS, 64, 64)
        for row in range(draws.rows):
            label[row, : 2 * row] = -100
        return {"x": draws.numbers(3, 64, 64), "label": label}

    return Case(First(model.float().train()), batches(batch), of_pixels)


class Detection(nn.Module):
    """A detector of torchvision, whose targets, a dict for each image, are tensors here."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, boxes: Tensor, classes: Tensor, **more: Tensor) -> Tensor:
        """Return the sum of the losses; ``boxes`` are of shape (rows, n, 4) in pixels, ``classes`` of (rows, n)."""
        targets = [
            {"boxes": boxes[i], "labels": classes[i], **{name: value[i] for name, value in more.items()}}
            for i in range(images.shape[0])
        ]
        losses = self.model(list(images.unbind()), targets)
        return sum(losses.values(), start=torch.zeros((), dtype=images.dtype))


class Maps(nn.Module):
    """Two feature maps of an image, by their names, as detectors want them."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.low = nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.ReLU(), nn.Conv2d(8, width, 3, 2, 1), nn.ReLU())
        self.high = nn.Sequential(nn.Conv2d(width, width, 3, 2, 1), nn.ReLU())
        self.out_channels = width

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return maps of 1/8 and 1/16 of the image's size, with ``width`` channels."""
        low = self.low(x)
        return {"0": low, "1": self.high(low)}


def detector(name: str, count: int) -> nn.Module:
    """Return a detector of ``count`` classes, the background among them, on a small net of convolutions."""
    import torchvision.models.detection as m
    from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
    from torchvision.models.detection.ssd import SSD, SSDHead
    from torchvision.ops import MultiScaleRoIAlign

    anchors = AnchorGenerator(((12,), (24,)), ((0.5, 1.0, 2.0),) * 2)
    sizes: dict[str, Any] = {"min_size": 64, "max_size": 64, "_skip_resize": True}  # else each image draws its size
    regions: dict[str, Any] = {
        **sizes,
        "rpn_anchor_generator": anchors,
        "rpn_pre_nms_top_n_train": 40,
        "rpn_post_nms_top_n_train": 20,
        "rpn_batch_size_per_image": 16,  # as few of all as in a large image, so that each has as many
        "box_batch_size_per_image": 8,
        "box_head": TwoMLPHead(16 * 49, 32),
        "box_predictor": FastRCNNPredictor(32, count),
    }
    makers: dict[str, Callable[[], nn.Module]] = {
        "faster_rcnn": lambda: m.FasterRCNN(Maps(), **regions),
        "mask_rcnn": lambda: m.MaskRCNN(
            Maps(),
            **regions,
            mask_roi_pool=MultiScaleRoIAlign(["0", "1"], output_size=4, sampling_ratio=2),
            mask_head=m.mask_rcnn.MaskRCNNHeads(16, (16,), 1),
            mask_predictor=m.mask_rcnn.MaskRCNNPredictor(16, 16, count),
        ),
        "keypoint_rcnn": lambda: m.KeypointRCNN(
            Maps(),
            **regions,
            keypoint_head=m.keypoint_rcnn.KeypointRCNNHeads(16, (16,)),
            keypoint_predictor=m.keypoint_rcnn.KeypointRCNNPredictor(16, 2),
        ),
        "retinanet": lambda: m.RetinaNet(Maps(), count, **sizes, anchor_generator=anchors),
        "fcos": lambda: m.FCOS(
            Maps(32), count, **sizes, anchor_generator=AnchorGenerator(((8,), (16,)), ((1.0,),) * 2)
        ),
        "ssd": lambda: SSD(
            Maps(),
            DefaultBoxGenerator([[2], [2]]),
            (64, 64),
            count,
            head=SSDHead([16, 16], [4, 4], count),
            _skip_resize=True,
        ),
    }
    return makers[name]()


def detection(name: str) -> Case:
    """Return a detector on images of shape (rows, 3, 64, 64), with two boxes in each."""
    torch.manual_seed(0)
    count = 2 if name == "keypoint_rcnn" else LABELS + 1
    model = detector(name, count).float().train()

    def batch(draws: Draws) -> dict[str, Tensor]:
        low, size = draws.uniform(2, 2) * 24, draws.uniform(2, 2) * 24 + 12
        found = {"images": draws.uniform(3, 64, 64), "boxes": torch.cat([low, low + size], -1)}
        found["classes"] = draws.integers(1, count, 2)
        if name == "mask_rcnn":
            found["masks"] = draws.integers(0, 2, 2, 64, 64).to(torch.uint8)
        if name == "keypoint_rcnn":
            points = low[:, :, None] + size[:, :, None] * draws.uniform(2, 2, 2)
            found["keypoints"] = torch.cat([points, torch.ones(*points.shape[:3], 1)], -1)
        return found

    return Case(Detection(model), batches(batch), weight="rows" if name == "faster_rcnn" else None)
