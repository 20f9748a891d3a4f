"""A sample of the sweep: models of all libraries and heads, those that once failed among them, under every plan."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))

from sweeping import condensed  # noqa: E402
from sweeping.outcome import PASSES, TRAINS  # noqa: E402
from sweeping.trial import trial  # noqa: E402
from sweeping.zoo import LIBRARIES, library  # noqa: E402

SAMPLE = (
    *(f"transformers/{name}" for name in (
        "llama/causal", "gpt2/causal", "gptj/causal", "bloom/causal", "mixtral/causal", "qwen3_moe/causal",
        "deepseek_v3/causal", "gemma3_text/causal", "mamba/causal", "falcon_mamba/causal", "axk1/causal",
        "bailing_hybrid/causal", "cpmant/causal", "bert/masked", "fnet/masked", "big_bird/masked",
        "albert/classification", "roberta/tokens", "distilbert/question", "bert/next", "bert/choice", "t5/seq2seq",
        "bart/seq2seq", "pegasus/seq2seq", "llava/image-text", "glm4v/image-text", "whisper/speech",
        "wav2vec2-bert/ctc", "audio-spectrogram-transformer/audio", "vit/image", "swin/image", "resnet/image",
        "convnext/image", "deit/masked-image", "timesformer/video", "vivit/video", "clip/contrastive",
        "siglip/contrastive", "segformer/segmentation", "dinov2/image",
    )),
    *(f"torchvision/{name}" for name in (
        "resnet18/image", "mobilenet_v2/image", "swin/image", "vit/image", "r3d_18/video",
        "fcn_resnet50/segmentation",
    )),
    *(f"timm/{name}/image" for name in (
        "convmixer", "convnext", "mlp_mixer", "efficientnet",
    )),
    *(f"diffusers/{name}" for name in (
        "UNet2DConditionModel/noise", "DiTTransformer2DModel/noise", "SD3Transformer2DModel/noise",
        "AutoencoderKL/autoencoder",
    )),
    *(f"peft/{name}" for name in (
        "llama/lora", "llama/dora", "gpt2/ia3", "t5/prompt",
    )),
    *(f"torch_geometric/{name}/graphs" for name in (
        "gcn", "gat",
    )),
)  # fmt: skip
RECORDS = condensed.read(ROOT / "scripts" / "sweep.json")


def test_the_sample_is_of_all_libraries() -> None:
    assert len(SAMPLE) == len(set(SAMPLE)) == 60 and {name.split("/")[0] for name in SAMPLE} == set(LIBRARIES)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SAMPLE)
def test_it_trains_as_on_one_device(name: str) -> None:
    """Every plan passes but those whose refusal or failure docs/models.md has."""
    try:
        models = library(name.split("/")[0])
    except ImportError as error:
        pytest.skip(f"{error}; scripts/sweeping/requirements.txt says what to install")
    plain, *found = trial(models[name])
    assert plain.outcome == TRAINS, plain.text
    known = RECORDS[name].plans if name in RECORDS else {}
    worse = [one for one in found if one.outcome not in (PASSES, known.get(one.plan, PASSES))]
    assert not worse, "\n".join(f"{one.plan}: {one.outcome}, {one.text}" for one in worse)
