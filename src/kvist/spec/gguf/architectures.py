"""The architectures that llama.cpp names: the family of each, and what its metadata says beyond sizes.

A family is named by its ``model_type`` in Hugging Face's files, whose reader then answers. Source of the names:
LLM_ARCH_NAMES of llama.cpp; of the steps: what the conversion scripts and ``load_arch_hparams`` write and read.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvist.spec.gguf import attention as a
from kvist.spec.gguf import latents, states
from kvist.spec.gguf.attention import Step, Windows
from kvist.spec.gguf.metadata import Metadata
from kvist.spec.gguf.network import gemma2, gemma3, gpt2, phi3


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One architecture.

    Attributes:
        family: whose reader answers; a function where the metadata decide.
        steps: each adds keys of the configuration.
    """

    family: str | Callable[[Metadata], str]
    steps: tuple[Step, ...]

    def family_of(self, m: Metadata) -> str:
        """The family of a file."""
        return self.family if isinstance(self.family, str) else self.family(m)


def _same(family: str | Callable[[Metadata], str], *more: Step) -> Architecture:
    """Attention with as many heads in all layers."""
    return Architecture(family=family, steps=(a.heads, *more))


def _own(family: str | Callable[[Metadata], str], *steps: Step) -> Architecture:
    return Architecture(family=family, steps=steps)


def _llama(m: Metadata) -> str:
    """Llama and Mistral call themselves llama, and so does Mixtral."""
    return "mixtral" if m.count("expert_count", default=0, least=0) else "llama"


def _olmo(m: Metadata) -> str:
    """OLMo 3 is OLMo 2 with windows."""
    return "olmo3" if m.count("attention.sliding_window", default=0, least=0) else "olmo2"


def _mamba(m: Metadata) -> str:
    """Falcon-Mamba is Mamba with norms in the mixer."""
    return "falcon_mamba" if m.get("ssm.dt_b_c_rms") is True else "mamba"


def _granite(m: Metadata) -> str:
    """Granite 3 without and with experts, and with a shared one."""
    return "granitemoeshared" if m.get("expert_shared_feed_forward_length") else "granitemoe"


def _granite_windows(m: Metadata) -> str:
    return "granitemoe_swa" if m.count("expert_count", default=0, least=0) else "granite_swa"


ARCHITECTURES: dict[str, Architecture] = {
    # All layers see everything.
    "llama": _same(_llama),
    "deci": _own("nemotron-nas", a.deci_heads),
    "falcon": _own("falcon", a.falcon_heads),
    "grok": _same("grok-1"),
    "gpt2": _same("gpt2", gpt2),
    "gptj": _same("gptj"),
    "gptneox": _same("gpt_neox"),
    "mpt": _own("mpt", a.mpt_heads),
    "baichuan": _same("baichuan"),
    "starcoder": _own("gpt_bigcode", a.one_head),
    "refact": _own("gpt_refact", a.one_head),
    "bloom": _same("bloom"),
    "stablelm": _same("stablelm"),
    "qwen": _same("qwen"),
    "qwen2": _same("qwen2", a.switched_off),
    "qwen2moe": _same("qwen2_moe", a.switched_off),
    "qwen2vl": _same("qwen2_vl_text", a.switched_off),
    "qwen3": _same("qwen3", a.switched_off),
    "qwen3moe": _same("qwen3_moe", a.switched_off),
    "qwen3vl": _same("qwen3_vl_text"),
    "qwen3vlmoe": _same("qwen3_vl_moe_text"),
    "phi2": _same("phi"),
    "phimoe": _same("phimoe", a.window_everywhere),
    "plamo": _same("gguf:plamo"),
    "codeshell": _same("gguf:codeshell"),
    "orion": _same("orion"),
    "internlm2": _same("internlm2"),
    "minicpm": _same("minicpm"),
    "gemma": _same("gemma"),
    "starcoder2": _same("starcoder2", a.window_left_out),
    "xverse": _same("xverse"),
    "command-r": _same("cohere"),
    "dbrx": _own("dbrx", a.dbrx_heads),
    "olmo": _same("olmo"),
    "olmoe": _same("olmoe"),
    "openelm": _own("openelm", a.openelm_heads),
    "arctic": _same("arctic", a.no_window),
    "deepseek": _same("deepseek"),
    "deepseek2-ocr": _same("deepseek"),
    "chatglm": _own("chatglm", a.chatglm_heads),
    "glm4": _same("glm4"),
    "glm4moe": _same("glm4_moe"),
    "bitnet": _same("bitnet"),
    "jais": _same("jais"),
    "jais2": _same("jais2"),
    "nemotron": _same("nemotron"),
    "exaone": _same("exaone"),
    "granite": _same("granite"),
    "granitemoe": _same(_granite),
    "chameleon": _same("chameleon"),
    "bailingmoe": _same("bailing_moe"),
    "bailingmoe2": _same("bailing_moe_v2"),
    "dots1": _same("dots1", a.no_window),
    "arcee": _same("arcee"),
    "ernie4_5": _same("ernie4_5"),
    "ernie4_5-moe": _same("ernie4_5_moe"),
    "paddleocr": _same("paddleocr_vl_text"),
    "hunyuan-moe": _same("hunyuan_v1_moe"),
    "hunyuan-dense": _same("hunyuan_v1_dense"),
    "hunyuan_vl": _same("hunyuan_vl_text"),
    "hy_v3": _same("hy_v3"),
    "smollm3": _same("smollm3"),
    "seed_oss": _same("seed_oss"),
    "grovemoe": _same("gguf:grovemoe"),
    "apertus": _same("apertus"),
    "minimax-m2": _same("minimax_m2"),
    "cogvlm": _same("gguf:cogvlm"),
    "pangu-embedded": _same("gguf:pangu-embedded"),
    "mistral3": _same("ministral3", a.no_window),
    "maincoder": _same("gguf:maincoder"),
    "talkie": _same("gguf:talkie"),
    "t5": _own("t5", a.t5),
    # Windows or chunks.
    "llama4": _same("llama4_text", Windows(period=4, width=8192, chunks=True)),
    "phi3": _same("phi3", a.window_everywhere, phi3),
    "gemma2": _same("gemma2", Windows(period=2, width=4096), gemma2),
    "gemma3": _same("gemma3_text", gemma3),
    "gemma3n": _own("gemma3n_text", a.gemma3n),
    "gemma4": _own("gemma4_text", a.gemma4),
    "cohere2": _same("cohere2", Windows(period=4, required=True)),
    "cohere2moe": _same("cohere2_moe", Windows(period=4, first=True, required=True)),
    "olmo2": _same(_olmo, Windows(period=4)),
    "exaone4": _same("exaone4", Windows(period=4, width_of_64=4096)),
    "exaone-moe": _same("exaone_moe", Windows(period=4, width=128)),
    "gpt-oss": _same("gpt_oss", Windows(period=2, required=True)),
    "granite_swa": _same(_granite_windows, Windows(period=None, required=True)),
    "afmoe": _same("afmoe", Windows(period=4)),
    "laguna": _same("laguna", Windows(period=4, first=True)),
    "mellum": _same("mellum", Windows(period=4)),
    "muse-glimmer": _same("muse_glimmer_text", Windows(period=4, required=True)),
    "smallthinker": _same("gguf:smallthinker", Windows(period=4, first=True)),
    "plamo3": _same("gguf:plamo3", Windows(period=8)),
    "spark2_5": _same("gguf:spark2_5", Windows(period=None, required=True)),
    "maple": _same("gguf:maple", Windows(period=None, required=True)),
    "mimo2": _own("mimo_v2", a.mimo2),
    "step35": _own("step3p5", a.step35),
    # Latents, indexers, compressed entries.
    "minicpm3": _own("minicpm3", latents.latent),
    "plm": _own("deepseek_v3", latents.latent),
    "deepseek2": _own("deepseek_v3", latents.latent),
    "mistral4": _own("mistral4", latents.latent),
    "deepseek32": _own("deepseek_v32", latents.indexed),
    "glm-dsa": _own("glm_moe_dsa", latents.scheduled),
    "hy_v4": _own("hy_v4", latents.sometimes_indexed),
    "dots3note": _own("dots3_note", latents.windowed_latents),
    "deepseek4": _own("deepseek_v4", latents.compressed),
    "minimax-m3": _own("minimax_m3_vl_text", a.minimax_m3),
    # States.
    "mamba": _own(_mamba, states.mamba),
    "mamba2": _own("mamba2", states.mamba2),
    "jamba": _own("jamba", states.jamba),
    "falcon-h1": _own("falcon_h1", states.falcon_h1),
    "plamo2": _own("plamo2", states.plamo2),
    "granitehybrid": _own("granitemoehybrid", states.granite),
    "nemotron_h": _own("nemotron_h", states.nemotron_h),
    "nemotron_h_moe": _own("nemotron_h", states.nemotron_h),
    "qwen3next": _own("qwen3_next", states.gated_delta),
    "qwen35": _own("qwen3_5_text", states.gated_delta),
    "qwen35moe": _own("qwen3_5_moe_text", states.gated_delta),
    "qwen4exp": _own("qwen4_exp_text", states.qwen4_exp),
    "kimi-linear": _own("kimi_linear", latents.linear_by_heads),
    "kimi-k3": _own("kimi_linear", latents.linear_by_heads),
    "bailingmoe3": _own("bailing_hybrid", latents.bailing3),
    "glm5-next": _own("glm5_next_text", latents.pooled),
    "minimax-01": _own("minimax_text_01", states.minimax_01),
    "lfm2": _own("lfm2", states.lfm2),
    "lfm2moe": _own("lfm2_moe", states.lfm2),
    "rwkv6": _own("rwkv6", states.rwkv),
    "rwkv7": _own("rwkv7", states.rwkv),
}

_ENCODER = "an encoder keeps no cache"
_DIFFUSION = "it reads the whole text in both directions for each step, and keeps no cache"
_DRAFT = "it drafts tokens for another model; what it keeps is that model's to say"
_SPEECH = "a model of sound, no decoder of text"

# Architectures that llama.cpp names and that have no memory of their own to plan.
REFUSED: dict[str, str] = {
    "clip": "the projector of a multimodal model, no language model; name the file of the model itself",
    **dict.fromkeys(
        (
            "bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3",
            "eurobert", "gemma-embedding", "llama-embed", "t5encoder",
        ),
        _ENCODER,
    ),
    **dict.fromkeys(("dream", "llada", "llada-moe", "rnd1"), _DIFFUSION),
    **dict.fromkeys(("eagle3", "dflash", "gemma4-assistant"), _DRAFT),
    **dict.fromkeys(("wavtokenizer-dec", "qwen3tts", "pockettts"), _SPEECH),
    "rwkv6qwen2": "RWKV in Qwen's layers, whose states are not described here",
    "arwkv7": "RWKV in Qwen's layers, whose states are not described here",
    "nanbeige": "its layers run several times, each with a cache of its own; not described here",
    "hrm_text": "its layers run several times, each with a cache of its own; not described here",
    "graniteswitch": "adapters that tokens choose, and a layer that remembers which; not described here",
}  # fmt: skip
