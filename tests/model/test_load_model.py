"""Models are opened safely, and known again."""

import json
import struct

import numpy as np
import pytest
import torch
from score.teacher_kit import save_teacher
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from vocagnolm.alignment import load_tokenizer
from vocagnolm.alignment.tokenizer import gguf_tokenizer, metadata
from vocagnolm.cli import app
from vocagnolm.errors import ModelError
from vocagnolm.model import load_causal_lm, open_model
from vocagnolm.model.load import resolve_dtype, weights_fingerprint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_teacher(tmp_path_factory.mktemp("teacher"))


def copy(folder, target):
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_a_folder(folder):
    files = open_model(folder, device="cpu")
    model = files.load()
    assert model.dtype == torch.float32 and not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert files.max_context == 128 and files.dtype_name == "float32"
    assert files.prefix_ids == (files.tokenizer.id_of("<|endoftext|>"),)
    assert files.describe()["architecture"] == "LlamaForCausalLM"
    assert load_causal_lm(folder, device="cpu", dtype="bfloat16").dtype == torch.bfloat16


def test_no_template_no_prefix(tmp_path):
    assert open_model(save_teacher(tmp_path / "t", bos=False), device="cpu").prefix_ids == ()


def test_the_configuration_of_a_tokenizer_can_ask_for_a_prefix(tmp_path):
    folder = save_teacher(tmp_path / "t", bos=False)
    settings = {"bos_token": "<|endoftext|>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    files = open_model(folder, device="cpu")
    assert files.prefix_ids == (files.tokenizer.id_of("<|endoftext|>"),)


def test_pickled_weights_are_not_opened(folder, tmp_path):
    other = copy(folder, tmp_path / "pickled")
    (other / "model.safetensors").unlink()
    # A pickle that would leave a trace if anything opened it.
    trace = tmp_path / "trace"
    payload = f"cposix\nsystem\n(S'touch {trace}'\ntR.".encode()
    (other / "pytorch_model.bin").write_bytes(payload)
    with pytest.raises(ModelError, match=r"pytorch_model.bin: pickled files can run code"):
        load_causal_lm(other, device="cpu")
    assert not trace.exists()


def test_a_model_s_own_code_is_not_run(folder, tmp_path):
    other = copy(folder, tmp_path / "remote")
    config = json.loads((other / "config.json").read_text())
    config |= {
        "model_type": "odd",
        "auto_map": {"AutoConfig": "odd.OddConfig", "AutoModelForCausalLM": "odd.Odd"},
    }
    (other / "config.json").write_text(json.dumps(config))
    (other / "odd.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelError, match="trust-remote-code"):
        load_causal_lm(other, device="cpu")


def test_missing_weights_are_an_error_not_random_numbers(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    other = copy(folder, tmp_path / "cut")
    weights = load_file(other / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model.layers.1.mlp.down_proj.weight"):
        load_causal_lm(other, device="cpu")


@pytest.mark.parametrize(
    ("source", "message"),
    [("/nowhere/at/all", "does not exist"), ("missing.gguf", "does not exist")],
)
def test_what_is_not_there(source, message):
    with pytest.raises(ModelError, match=message):
        open_model(source, device="cpu")


def test_a_folder_that_is_no_model(tmp_path):
    with pytest.raises(ModelError, match=r"no config.json"):
        open_model(tmp_path, device="cpu")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="no safetensors weights"):
        open_model(tmp_path, device="cpu")


def test_wrong_names_of_devices_and_dtypes(folder):
    with pytest.raises(ValueError, match="device"):
        open_model(folder, device="tpu")
    with pytest.raises(ValueError, match="dtype"):
        open_model(folder, device="cpu", dtype="int4")


def test_auto_dtype():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    half, single = LlamaConfig(dtype="float16"), LlamaConfig(dtype="float32")
    assert resolve_dtype("auto", cpu, half) == torch.float32
    assert resolve_dtype("auto", cuda, half) == torch.float16
    assert resolve_dtype("auto", cuda, single) == torch.bfloat16


def test_the_fingerprint_sees_a_change_anywhere_it_looks(tmp_path):
    path = tmp_path / "w.safetensors"
    content = bytearray(np.random.default_rng(0).bytes(20 * 2**20))
    path.write_bytes(content)
    before = weights_fingerprint([path])
    assert weights_fingerprint([path]) == before
    for place in (0, len(content) - 1):
        content[place] ^= 1
        path.write_bytes(content)
        assert weights_fingerprint([path]) != before
        content[place] ^= 1
    path.write_bytes(content[:-1])
    assert weights_fingerprint([path]) != before


def write_gguf(path, model, tokenizer, **adds):
    """A Llama as llama.cpp's converter writes it, in float32."""
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    description = json.loads(tokenizer.to_str())
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    tokens += [f"[PAD{i}]" for i in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges([" ".join(pair) for pair in description["model"]["merges"]])
    for name, add in (("bos", writer.add_bos_token_id), ("eos", writer.add_eos_token_id)):
        add(getattr(config, f"{name}_token_id"))
    for name, add in adds.items():
        getattr(writer, f"add_add_{name}_token")(add)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for part, count in heads.items():
            if part in name:  # the converter reorders rotary halves
                halves = array.reshape(count, 2, -1, array.shape[1])
                array = halves.swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(names.get_name(name, (".weight",)), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_the_same_model(folder, tmp_path):
    from tokenizers import Tokenizer

    original = LlamaForCausalLM.from_pretrained(folder).eval()
    path = tmp_path / "tiny.gguf"
    write_gguf(path, original, Tokenizer.from_file(str(folder / "tokenizer.json")))
    files = open_model(path, device="cpu")
    assert files.name == "tiny.gguf" and files.tokenizer.name == "tiny"
    ids = torch.tensor([[5, 300, 17, 42, 8]])
    with torch.no_grad():
        torch.testing.assert_close(
            files.load()(ids).logits, original(ids).logits, atol=1e-4, rtol=1e-4
        )
    text = "Let x be a number with x + 1 = 2."
    expected = open_model(folder, device="cpu").tokenizer.spans(text).ids
    np.testing.assert_array_equal(files.tokenizer.spans(text).ids, expected)
    call = ["compare", "--student", str(folder), "--teacher", str(path), "--json"]
    (pair,) = json.loads(CliRunner().invoke(app, call).stdout)["pairs"]
    assert pair["teacher"] == "tiny" and pair["overlap"]["bytes"] > 0.9


@pytest.mark.parametrize("adds", [{}, {"bos": False}, {"bos": True}, {"bos": True, "eos": True}])
def test_a_gguf_file_says_what_stands_around_a_text(folder, tmp_path, adds):
    from tokenizers import Tokenizer

    model = LlamaForCausalLM.from_pretrained(folder)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model, Tokenizer.from_file(str(folder / "tokenizer.json")), **adds)
    first, last = model.config.bos_token_id, model.config.eos_token_id
    assert load_tokenizer(path).prefix_ids == ((first,) if adds.get("bos") else ())
    ids = gguf_tokenizer(path)("x + 1").input_ids
    assert (ids[0] == first) == adds.get("bos", False)
    assert (ids[-1] == last) == adds.get("eos", False)


def test_the_metadata_of_a_gguf_file_are_found_by_their_keys(tmp_path):
    def header(*entries):
        path = tmp_path / "header.gguf"
        path.write_bytes(b"GGUF" + b"".join(entries))
        return path

    def entry(key, kind, value):
        return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value

    model = entry("tokenizer.ggml.model", 8, struct.pack("<Q", 5) + b"llama")
    says = entry("tokenizer.ggml.add_bos_token", 7, b"\0")
    assert metadata(header(says, model), "tokenizer.ggml.model") == "llama"
    assert metadata(header(model, says), "tokenizer.ggml.add_bos_token") is False
    assert metadata(header(model), "tokenizer.ggml.add_bos_token") is None


def test_a_hub_model_with_pickled_weights_alone(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: str(tmp_path))
    with pytest.raises(ModelError, match=r"^owner/name has no safetensors.*refs/pr/N"):
        open_model("owner/name", device="cpu")
