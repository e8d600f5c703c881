"""Models of images, sound and text, whose decoder is another family's: where its configuration lies.

What the other parts make of an image or a sound becomes tokens of the decoder and so costs what tokens cost. A part
is read with its own ``model_type``; where it leaves that out, with the one that the wrapper's class takes. Extracts
of such files print the decoder's keys at the outer level. Source: the configuration classes of transformers 5.24, and
published files for names that it does not have.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from kvist.errors import UnsupportedModel
from kvist.spec.config_keys import ConfigKeys
from kvist.spec.families.reading import Reader, Reading
from kvist.spec.foreign import refuse_foreign


@dataclass(frozen=True, kw_only=True)
class Nesting:
    """Where a decoder lies.

    Attributes:
        inside: keys of the part, outermost first; the first that is there counts where there are several ways.
        family: of a part that does not say.
    """

    inside: tuple[tuple[str, ...], ...]
    family: str


def _text(family: str) -> Nesting:
    return Nesting(inside=(("text_config",),), family=family)


def _language(family: str) -> Nesting:
    return Nesting(inside=(("language_config",), ("text_config",)), family=family)


def _llm(family: str) -> Nesting:
    return Nesting(inside=(("llm_config",), ("text_config",)), family=family)


NESTED: dict[str, Nesting] = {
    "apertus1p5": _text("apertus1p5_text"),
    "aria": _text("aria_text"),
    "audioflamingo3": _text("qwen2"),
    "aya_vision": _text("cohere2"),
    "bailing_moe_v3_vl": _text("bailing_hybrid"),
    "blip-2": _text("opt"),
    "cohere2_vision": _text("cohere2"),
    "cosmos3_edge": _text("cosmos3_edge_text"),
    "cosmos3_omni": _text("qwen3_vl_text"),
    "deepseek_ocr2": _text("deepseek_ocr2_text"),
    "deepseek_vl": _language("llama"),
    "deepseek_vl_hybrid": _language("llama"),
    "deepseek_vl_v2": _language("deepseek_v2"),
    "deepseekocr": _language("deepseek_v2"),
    "emu3": _text("emu3_text_model"),
    "ernie4_5_vl_moe": _text("ernie4_5_vl_moe_text"),
    "exaone4_5": _text("exaone4"),
    "fast_vlm": _text("qwen2"),
    "florence2": _text("bart"),
    "fun_asr_nano": _text("qwen3"),
    "fuyu": _text("persimmon"),
    "gemma3n": _text("gemma3n_text"),
    "gemma4": _text("gemma4_text"),
    "gemma4_unified": _text("gemma4_unified_text"),
    "glm46v": _text("glm4v_text"),
    "glm4v": _text("glm4v_text"),
    "glm4v_moe": _text("glm4v_moe_text"),
    "glm5_next": _text("glm5_next_text"),
    "glm_ocr": _text("glm_ocr_text"),
    "glmasr": _text("llama"),
    "glmga": _text("glm4v_text"),
    "got_ocr2": _text("qwen2"),
    "granite4_vision": _text("granite4_vision_text"),
    "granite_docling": _text("granite_docling_text"),
    "granite_speech": _text("granite"),
    "granite_speech_plus": _text("granite"),
    "hunyuan_vl": _text("hunyuan_vl_text"),
    "hy_v4_vl": _text("hy_v4_vl_text"),
    "hyperclovax_vision_v2": _text("hyperclovax"),
    "idefics2": _text("mistral"),
    "idefics3": _text("llama"),
    "inkling2": _text("inkling2_text"),
    "inkling2_loop": _text("inkling2_loop_text"),
    "instructblip": _text("opt"),
    "instructblipvideo": _text("opt"),
    "internvl": _text("qwen2"),
    "internvl_chat": _llm("internlm2"),
    "janus": _language("llama"),
    "jev": _text("qwen3_5_text"),
    "interns1": _text("qwen3_moe"),
    "kimi_k25": _text("deepseek_v3"),
    "kimi_k3": _text("kimi_linear"),
    "kimi_vl": _text("deepseek_v3"),
    "lfm2_vl": _text("lfm2"),
    "lfm3_vl": _text("lfm3"),
    "lighton_ocr": _text("qwen3"),
    "llama4": _text("llama4_text"),
    "llava": _text("llama"),
    # LLaVA as first published, with the decoder's keys at the outer level.
    "llava_llama": _text("llama"),
    "llava_mistral": _text("mistral"),
    "llava_qwen": _text("qwen2"),
    "llava_next": _text("llama"),
    "llava_next_video": _text("llama"),
    "llava_onevision": _text("qwen2"),
    "minicpm_ocr": _text("qwen3_5_text"),
    "minicpmv4_6": _text("qwen3_5_text"),
    "minicpmv4_7": _text("qwen3_5_text"),
    "minimax_m3_vl": _text("minimax_m3_vl_text"),
    "minimax_vl_01": _text("minimax_text_01"),
    "mistral3": _text("mistral"),
    "mistral_large4": _text("mistral_large4_text"),
    "mllama": _text("mllama_text_model"),
    "molmo2": _text("molmo2_text"),
    "moss_transcribe_diarize": _text("qwen3"),
    "multi_modality": _language("llama"),
    "muse_glimmer": _text("muse_glimmer_text"),
    "muse_spark": _text("muse_spark_text"),
    "musicflamingo": _text("qwen2"),
    "nemo_speechlm": _text("nemotron_h"),
    "nemotron_h_omni": _llm("nemotron_h"),
    "NemotronH_Nano_VL_V2": _llm("nemotron_h"),
    "omniasr": _text("llama"),
    "ovis": _llm("qwen2"),
    "ovis2_5": _llm("qwen3"),
    "ovis2": _text("qwen2"),
    "paddleocr_vl": _text("paddleocr_vl_text"),
    "paligemma": _text("gemma"),
    "perception_lm": _text("llama"),
    "pp_chart2table": _text("qwen2"),
    "qianfan_ocr": _text("qwen3"),
    "qwen2_5_omni": Nesting(inside=(("thinker_config", "text_config"),), family="qwen2_5_omni_text"),
    "qwen2_5_omni_thinker": _text("qwen2_5_omni_text"),
    "qwen2_5_vl": _text("qwen2_5_vl_text"),
    "qwen2_audio": _text("qwen2"),
    "qwen2_vl": _text("qwen2_vl_text"),
    "qwen3_5": _text("qwen3_5_text"),
    "qwen3_5_moe": _text("qwen3_5_moe_text"),
    "qwen3_asr": Nesting(inside=(("thinker_config", "text_config"), ("text_config",)), family="qwen3"),
    "qwen3_omni_moe": Nesting(inside=(("thinker_config", "text_config"),), family="qwen3_omni_moe_text"),
    "qwen3_omni_moe_thinker": _text("qwen3_omni_moe_text"),
    "qwen3_vl": _text("qwen3_vl_text"),
    "qwen3_vl_moe": _text("qwen3_vl_moe_text"),
    "qwen4_exp": _text("qwen4_exp_text"),
    "shieldgemma2": _text("gemma3_text"),
    "smolvlm": _text("llama"),
    "speech-encoder-decoder": Nesting(inside=(("decoder",),), family="bart"),
    "step3_vl": _text("step3_text"),
    "step3p7": _text("step3p5"),
    "t5gemma": Nesting(inside=(("decoder",),), family="t5_gemma_module"),
    "vibevoice_asr": _text("qwen2"),
    "video_llama_3": _text("qwen2"),
    "video_llava": _text("llama"),
    "vipllava": _text("llama"),
    "vision-encoder-decoder": Nesting(inside=(("decoder",),), family="trocr"),
    "voxtral": _text("llama"),
    "voxtral_realtime": _text("voxtral_realtime_text"),
}


def read_inside(nesting: Nesting, keys: ConfigKeys, families: Mapping[str, Reader] | None = None) -> Reading:
    """Read the decoder of a larger model.

    Args:
        nesting: where it lies.
        keys: of the whole.
        families: that it may be of; None for all.

    Raises:
        UnsupportedModel: the part is of a family that is not read, or has a key that means another memory; names the
            key.
        BadFile: the part is missing or of another kind.
    """
    from kvist.spec.families import FAMILIES

    known = FAMILIES if families is None else families
    inner = _part(nesting, keys)
    if inner.family not in known:
        raise UnsupportedModel(
            f"{inner.name}: model_type is {inner.family!r}, which is not read; the configuration of a "
            f"{keys.family} model has another there",
            key="model_type",
        )
    reading = known[inner.family](inner)
    refuse_foreign(inner)
    return reading


def _part(nesting: Nesting, keys: ConfigKeys) -> ConfigKeys:
    for path in nesting.inside:
        if keys.get(path[0]) is not None:
            inner = keys
            for key in path[:-1]:
                inner = inner.nested(key, model_type=keys.family, only=False)
            return inner.nested(path[-1], model_type=nesting.family, only=False)
    if keys.get("num_hidden_layers") is not None:
        return keys.flat(model_type=nesting.family)
    raise keys.missing(nesting.inside[0][0])


WRAPPERS: dict[str, Reader] = {name: partial(read_inside, nesting) for name, nesting in NESTED.items()}
