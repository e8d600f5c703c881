"""Write the gallery: published configurations, restated in kvist's own schema.

    python tools/gallery.py FOLDER [FOLDER ...] [IDS.json]

Each folder holds configurations, one JSON file a model: ``ORGANISATION--NAME.json``, or any name with the hub id under
``_model``. ``_source`` says where one was taken from. ``IDS.json`` tells the hub ids and sources of files with other
names: ``{"cases": [{"file", "hf_id", "source", "provenance"}]}``, of which copies of whole files are taken. Of several
of one model the first that is read exactly is taken.

Of a configuration only those keys are kept that a number of a plan depends on: a key goes where the model without it
has the same layers, the same limits, the same weights and no more assumptions. What :mod:`gallery_series` completes is
named in the source of the entry. Prints what it leaves out, and why.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gallery_restated import RESTATED
from gallery_series import SERIES, Series

from kvist.errors import KvistError, UnsupportedModel
from kvist.spec.families import Reading, read_config
from kvist.spec.gallery import GALLERY_FILE, IMMATERIAL
from kvist.spec.known import KNOWN
from kvist.spec.parameters import inventory_of
from kvist.spec.parameters.storage import storage_of

# What plans for devices, ranks and other engines look at besides the layers.
_ALWAYS = frozenset(
    {"model_type", "hidden_size", "num_attention_heads", "n_head", "vocab_size", "intermediate_size", "index_topk"}
    | {"index_n_heads", "index_head_dim", "n_groups", "mamba_n_groups", "ssm_state_size", "mamba_d_state"}
    | {"mamba_ssm_dtype", "mamba_ssm_cache_dtype", "torch_dtype", "dtype", "num_experts_per_tok", "head_dim"}
    | {"max_position_embeddings", "num_key_value_heads", "num_hidden_layers", "text_config"}
)
# Extracts that are filed under another model's id: this one is the size of its larger sibling.
_MISFILED = {"bigcode/starcoder2-3b": "bigcode/starcoder2-7b"}
# Extracts that spell these as the library does that they come from, not as the published file does.
_RESPELT = {"litgpt": ("vocab_size", "partial_rotary_factor"), "maxtext": ("vocab_size",)}
_WHOLE = frozenset({"verbatim_copy", "published_dict_reserialised"})
_ENDINGS = re.compile(r"-hf$")
_QUANTISED = re.compile(r"-(fp8|nvfp4)\b", re.IGNORECASE)
_DATED = re.compile(r"(?:retrieved|as of) (20[0-9]{2}-[0-9]{2})")
# Words that say how a copy differs from the model it is made of, not what it remembers.
_TUNED = re.compile(
    r"-(instruct|chat|it|base|thinking|hf|fp8|nvfp4|bf16|static|pertensor|pt|1m|[0-9]{4}|reasoning|plus|prev)(?=-|$)"
)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A configuration that somebody published or restated."""

    hub: str
    config: dict[str, Any]
    source: str
    whole: bool


def main(paths: Sequence[str]) -> int:
    """Write the gallery from the folders; return an exit code."""
    found: dict[str, list[Candidate]] = {}
    folders = [path for path in map(Path, paths) if path.is_dir()]
    cases = [case for path in map(Path, paths) if path.is_file() for case in json.loads(path.read_text())["cases"]]
    verbatim = {case["file"]: case for case in cases if case["provenance"] in _WHOLE}
    for folder in folders:
        for candidate in _candidates(folder, verbatim):
            found.setdefault(candidate.hub.lower(), []).append(candidate)
    for content in RESTATED:
        found.setdefault(content["_model"].lower(), []).append(_candidate(content, content["_model"]))
    entries = []
    for candidates in found.values():
        entry = _entry(sorted(candidates, key=lambda each: not each.whole))
        if entry is not None:
            entries.append(entry)
    _name(entries)
    entries.sort(key=lambda entry: entry["name"])
    lines = (json.dumps(entry, separators=(",", ":"), ensure_ascii=False) for entry in entries)
    GALLERY_FILE.write_text("\n".join(lines) + "\n")
    print(f"{len(entries)} models, {GALLERY_FILE.stat().st_size:,} bytes")
    return 0


def _candidates(folder: Path, cases: Mapping[str, Mapping[str, Any]]) -> Iterator[Candidate]:
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        if path.name in cases:
            case = cases[path.name]
            config = {key: value for key, value in content.items() if not key.startswith("_")}
            source = case["source"].partition(" (")[0]
            if not source.startswith("github.com/"):
                source = f"config.json of {case['hf_id']}"
            yield Candidate(hub=case["hf_id"], config=config, source=source, whole=True)
            continue
        hub = content.get("_model") or path.stem.replace("--", "/")
        if "/" not in hub:
            continue
        hub = _MISFILED.get(hub, hub)
        yield _candidate(content, hub)


def _candidate(content: Mapping[str, Any], hub: str) -> Candidate:
    source = str(content.get("_source", "")).strip()
    if not source or source.startswith("a public repository"):
        source = f"config.json of {hub}"
    config = {key: value for key, value in content.items() if not key.startswith("_")}
    return Candidate(hub=hub, config=config, source=source, whole="_source" not in content)


def _entry(candidates: list[Candidate]) -> dict[str, Any] | None:
    reasons = []
    # A whole file names no source of its own; an extract of the same file may.
    cited = [each.source for each in candidates if not each.source.startswith("config.json of ")]
    for candidate in candidates:
        series = [each for each in SERIES if re.fullmatch(each.ids, candidate.hub)]
        given = _respelt(candidate)
        completed = {
            key: value
            for each in series
            for key, value in each.config.items()
            if key not in candidate.config or (key in _RESPELT_KEYS and key not in given) or key == "sliding_window"
        }
        if candidate.whole:
            completed = {}
        for extra in (completed, {}):
            try:
                return _restated(candidate, given | extra, extra, series, cited)
            except KvistError as error:
                reasons.append(f"{candidate.hub}: {error}")
    print("\n".join(reasons))
    return None


_RESPELT_KEYS = {key for keys in _RESPELT.values() for key in keys}


def _respelt(candidate: Candidate) -> dict[str, Any]:
    for library, keys in _RESPELT.items():
        if library in candidate.source:
            return {key: value for key, value in candidate.config.items() if key not in keys}
    return dict(candidate.config)


def _restated(
    candidate: Candidate,
    config: dict[str, Any],
    completed: Mapping[str, Any],
    series: list[Series],
    cited: list[str],
) -> dict[str, Any]:
    reading = read_config(config, name="config")
    if completed.get("model_type"):
        _hold_against_extract(candidate, completed, reading)
    kept = _least(config)
    counted = _weights(kept)
    if _QUANTISED.search(candidate.hub) and "quantization_config" not in repr(kept):
        # Nobody can tell from such a file what its weights weigh.
        counted.pop("weights", None)
    named = not candidate.source.startswith("config.json of ")
    source = cited[0] if candidate.whole and cited and not named else candidate.source
    told = {key: value for key, value in completed.items() if _holds(kept, key)}
    if told:
        source += f"; {', '.join(f'{key} {json.dumps(value)}' for key, value in told.items())} as published"
    entry: dict[str, Any] = {"name": "", "hub": candidate.hub}
    also = [one for each in series for one in each.also]
    aliases = [alias for each in series for alias in each.aliases]
    entry |= {"also": also} if also else {}
    entry |= {"aliases": aliases} if aliases else {}
    entry["released"] = next((each.released for each in reversed(series) if each.released), None)
    if entry["released"] is None:
        dated = _DATED.search(source)
        entry["seen"] = dated[1] if dated else None
    entry["license"] = next((each.license for each in reversed(series) if each.license), None)
    entry["source"] = source
    entry |= counted
    entry["config"] = kept
    entry["_named"] = next((each.name for each in reversed(series) if each.name), None)
    return entry


def _hold_against_extract(candidate: Candidate, completed: Mapping[str, Any], reading: Reading) -> None:
    """Refuse a completion that changes what the extract alone already says."""
    try:
        alone = read_config(candidate.config, name="config")
    except KvistError:
        return
    if alone.layers != reading.layers and "sliding_window" not in completed:
        raise UnsupportedModel(f"as {completed['model_type']} its layers are others than by its numbers alone")


def _holds(kept: Mapping[str, Any], key: str) -> bool:
    return key in kept or any(key in part for part in kept.values() if isinstance(part, Mapping))


@dataclass(frozen=True)
class _Answer:
    """All that a plan asks of a configuration."""

    layers: Any
    drafts: Any
    context: int
    assumed: frozenset[str]
    weights: str


def _answer(config: Mapping[str, Any]) -> _Answer:
    reading = read_config(json.loads(json.dumps(config)), name="config")
    try:
        inventory = inventory_of(reading.config, reading.layers)
        storage = storage_of(reading.config, None)
        weights = repr([(tensor, storage.sizes(tensor)) for tensor in inventory.tensors]) + repr(inventory.beside)
    except KvistError as error:
        weights = str(error)
    return _Answer(
        layers=reading.layers,
        drafts=reading.draft_layers,
        context=reading.max_context,
        assumed=frozenset(entry.key for entry in reading.assumed if entry.key not in IMMATERIAL),
        weights=weights,
    )


def _least(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration without the keys on which nothing depends."""
    kept: dict[str, Any] = json.loads(json.dumps(config))
    wanted = _answer(kept)
    for holder in (kept, kept.get("text_config"), kept.get("quantization_config")):
        if not isinstance(holder, dict):
            continue
        for key in list(holder):
            if key in _ALWAYS:
                continue
            value = holder.pop(key)
            try:
                same = _answer(kept) == wanted
            except KvistError:
                same = False
            if not same:
                holder[key] = value
    return {key: kept[key] for key in ("model_type", *kept) if key in kept}


def _weights(config: dict[str, Any]) -> dict[str, Any]:
    """Parameters, and bytes where the configuration says in which type they are stored."""
    reading = read_config(json.loads(json.dumps(config)), name="config")
    try:
        inventory = inventory_of(reading.config, reading.layers)
        storage = storage_of(reading.config, None)
    except KvistError:
        return {}
    counted: dict[str, Any] = {"parameters": inventory.parameters}
    if not storage.assumed_type and not inventory.beside:
        sizes = (
            storage.sizes(tensor)[layer].size for tensor in inventory.tensors for layer in (tensor.layers or (None,))
        )
        counted["weights"] = sum(sizes)
    return counted


def _name(entries: list[dict[str, Any]]) -> None:
    """Give each entry a name of its own, and drop those that the wheels' models have."""
    taken = set(KNOWN) | {alias for known in KNOWN.values() for alias in known.aliases}
    by_name: dict[str, dict[str, Any]] = {}
    entries.sort(key=lambda entry: (not entry["_named"], entry["hub"].lower()))
    for entry in list(entries):
        hub = entry["hub"].lower().partition("/")[2]
        name = entry.pop("_named") or _ENDINGS.sub("", hub.removeprefix("meta-"))
        if name in taken:
            entries.remove(entry)
            first = by_name.get(name)
            if first is None or _layers(first) != _layers(entry):
                print(f"{entry['hub']}: left out, {name} is taken")
            else:
                first.setdefault("also", []).append(entry["hub"])
                first.setdefault("aliases", []).append(hub)
            continue
        taken.add(name)
        entry["name"] = name
        by_name[name] = entry
    for entry in entries:
        hub = entry["hub"].lower().partition("/")[2]
        aliases = dict.fromkeys([*([hub] if hub != entry["name"] else []), *entry.pop("aliases", ())])
        free = [alias for alias in aliases if alias not in taken]
        taken.update(free)
        if free:
            entry["aliases"] = free
    for entry in entries:
        stem = _TUNED.sub("", entry["name"])
        if stem not in taken:
            taken.add(stem)
            entry.setdefault("aliases", []).append(stem)
    by_memory: dict[str, dict[str, Any]] = {}
    for entry in sorted(entries, key=lambda each: (len(each["name"]), each["name"])):
        stem = _TUNED.sub("", entry["name"])
        key = f"{stem} {_layers(entry)}"
        first = by_memory.setdefault(key, entry)
        if first is not entry:
            entry["like"] = first["name"]
            _complete(entry, first)
    order = ("name", "hub", "aliases", "also", "like", "released", "seen", "license", "source", "parameters", "weights")
    for entry in entries:
        values = {key: entry[key] for key in (*order, "config") if entry.get(key) is not None}
        entry.clear()
        entry.update(values)


def _layers(entry: Mapping[str, Any]) -> object:
    return read_config(json.loads(json.dumps(entry["config"])), name="config").layers


def _complete(entry: dict[str, Any], model: Mapping[str, Any]) -> None:
    """Give a copy with unknown shapes the keys of the model that it is tuned from."""
    if "parameters" in entry or "parameters" not in model or _QUANTISED.search(entry["name"]):
        return
    context = read_config(entry["config"], name="config").max_context
    config = json.loads(json.dumps(model["config"]))
    holder = config.get("text_config", config)
    holder["max_position_embeddings"] = context
    if read_config(json.loads(json.dumps(config)), name="config").max_context != context:
        return
    entry["config"] = config
    entry["source"] += f"; shapes of the network as {model['name']}"
    entry |= _weights(config)


if __name__ == "__main__":
    sys.exit(main(tuple(sys.argv[1:])))
