"""Numbers and fields of models of sound and speech."""

from __future__ import annotations

from typing import Any

import torch

from sweeping.case import LENGTH, SAMPLES, WORDS
from sweeping.shrink import DEFAULT, FIRST_ID, PARTS, WIDTH

MONO = {"fields": {"input_values": lambda shape, draws, fields: draws.numbers(1, SAMPLES)}}
DECODED = {"fields": {"decoder_input_ids": lambda shape, draws, fields: draws.integers(FIRST_ID, WORDS - 40, LENGTH)}}
WAVES = {"fields": {"hidden_states": lambda shape, draws, fields: draws.numbers(1, 64)}}
STATES = {"fields": {"hidden_states": lambda shape, draws, fields: draws.numbers(WIDTH, LENGTH)}}
SPOKEN = {
    "fields": {
        "attention_mask": lambda shape, draws, fields: None,
        "duration_labels": lambda shape, draws, fields: torch.full((draws.rows, LENGTH), 2),
        "pitch_labels": lambda shape, draws, fields: draws.numbers(LENGTH, 1),
        "energy_labels": lambda shape, draws, fields: draws.numbers(LENGTH, 1),
        "spectrogram_labels": lambda shape, draws, fields: draws.numbers(2 * LENGTH, shape.number(16, "num_mel_bins")),
    }
}

CODES = {
    "packed": "input_ids",
    "fields": {
        "input_ids": lambda shape, draws, fields: draws.integers(FIRST_ID, 20, 4, LENGTH),
        "labels": lambda shape, draws, fields: draws.integers(FIRST_ID, 20, LENGTH, 4),
    },
}


SOUND: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {
        "config": {"max_length": 64, "num_mel_bins": 16, "time_stride": 8, "frequency_stride": 8},
        "fields": {
            "input_values": lambda shape, draws, fields: draws.numbers(64, 16),
            "attention_mask": lambda shape, draws, fields: None,
        },
    },
    "clap": {
        "fields": {"input_features": lambda shape, draws, fields: draws.numbers(1, 64, 32)},
        "config": {"audio_config": {"spec_size": 128, "window_size": 2, "num_mel_bins": 32, "hidden_size": 256}},
    },
    "clvp": {
        "config": {
            "text_config": {"hidden_size": 128},
            "speech_config": {"hidden_size": 128},
            "decoder_config": {"hidden_size": 128},
        },
        "mel_first": True,
    },
    "dac": MONO,
    "encodec": {**MONO, "config": {"sampling_rate": DEFAULT, "num_filters": 4, "target_bandwidths": [1.5, 3.0]}},
    "fastspeech2_conformer": SPOKEN,
    "fastspeech2_conformer_with_hifigan": {**SPOKEN, "config": {"vocoder_config": {"model_in_dim": 16}}},
    "fun_asr_nano": {"config": {"adaptor_config": {"intermediate_size": 8}}, "feature_projection_input_dim": 112},
    "fun_asr_nano_encoder": {"feature_projection_input_dim": 112, "sweep_frames": 16},
    "gemma4_audio": {"feature_projection_input_dim": 64},
    "granite_speech5_ctc": {"config": {"encoder_config": {"context_size": 16}}, "num_mel_bins": 64},
    "granite_speech5_encoder": {"config": {"context_size": 16}, "num_mel_bins": 64},
    "kyutai_speech_to_text": {
        "fields": {
            "input_ids": lambda shape, draws, fields: draws.integers(
                FIRST_ID, 20, LENGTH, 1 + shape.number(32, "num_codebooks")
            ),
            "attention_mask": lambda shape, draws, fields: None,
            "labels": lambda shape, draws, fields: draws.targets(WORDS - 40, LENGTH),
        }
    },
    "mimi": {**MONO, "config": {"num_quantizers": 4}, "leaves": "a codebook of the dtype of the first forward"},
    "mimi_decoder": {
        "config": {"upsampling_ratios": [2, 2], "sampling_rate": 100, "frame_rate": 12.5, "num_filters": 8},
        "fields": {"latents": lambda shape, draws, fields: draws.numbers(WIDTH, LENGTH)},
    },
    "mimi_encoder": {**MONO, "config": {"num_quantizers": 4}, "leaves": "a codebook of the dtype of the first forward"},
    "moonshine": {"config": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4}},
    "moonshine_streaming": {"config": {"num_key_value_heads": 4, "encoder_config": {"sample_rate": 16000}}},
    "muse_spark_audio": {"config": {"num_hidden_layers": 4}, "sweep_samples": 3840},
    "musicgen": CODES,
    "musicgen_melody": CODES,
    "nemotron3_5_asr": {**DECODED, "config": {"default_prompt_id": 0}},
    "nemotron_asr_streaming": DECODED,
    "neucodec": {
        **MONO,
        "config": {"quantization_dim": 64, "input_sampling_rate": DEFAULT, "output_sampling_rate": DEFAULT},
        "sweep_frames": 12,
    },
    "parakeet_rnnt": DECODED,
    "parakeet_tdt": DECODED,
    "pe_audio": MONO,
    "pe_audio_encoder": MONO,
    "pe_audio_video": MONO,
    "pe_audio_video_encoder": MONO,
    "pocket_tts_audio_tokenizer": MONO,
    "pocket_tts_audio_tokenizer_decoder": {
        "fields": {"latents": lambda shape, draws, fields: draws.numbers(WIDTH, LENGTH)}
    },
    "pocket_tts_audio_tokenizer_encoder": MONO,
    "qwen3_asr_encoder": {
        "mel_first": True,
        "config": {"n_window": 50, "n_window_infer": 100},
        "sweep_frames": 200,
        "fields": {"input_features_mask": lambda shape, draws, fields: torch.ones(draws.rows, 200, dtype=torch.long)},
    },
    "speech-encoder-decoder": {"only": ("input_values",)},
    "vibevoice_acoustic_tokenizer": {**MONO, "config": PARTS["vibevoice_acoustic_tokenizer"]},
    "vibevoice_acoustic_tokenizer_decoder": {**STATES, "config": PARTS["vibevoice_acoustic_tokenizer_decoder"]},
    "vibevoice_acoustic_tokenizer_encoder": {**WAVES, "config": PARTS["vibevoice_acoustic_tokenizer_encoder"]},
    "voxtral_realtime": {
        "mel_first": True,
        "fields": {
            "input_ids": lambda shape, draws, fields: draws.integers(FIRST_ID, WORDS - 40, 8),
            "labels": lambda shape, draws, fields: draws.targets(WORDS - 40, 8),
        },
    },
    "xcodec": {**MONO, "config": {"codebook_dim": 64}},
    "xcodec2": {**MONO, "config": {"quantization_dim": 64}, "sweep_frames": 12},
}
