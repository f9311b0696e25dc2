"""A local server that has a real tiny model and answers as vLLM or SGLang would: greedily, one
prompt and one token at a time, so that nothing of ours is in what it writes."""

import torch
from score.server_kit import MODEL, Replay
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM


class Live(Replay):
    """`faults`, `slow`, `requests` and the rest as in `Replay`."""

    def __init__(self, folder, engine="vllm"):
        super().__init__(engine)
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
        self.context = self.model.config.max_position_embeddings
        entry = {"id": MODEL, "owned_by": engine, "root": str(folder)}
        self.models = {"data": [entry | {"max_model_len": self.context}]}
        self.sent = []
        """Every request for answers, and not for losses."""

    def tokenized(self, content):
        ids = self.tokenizer.encode(content["prompt"], add_special_tokens=False).ids
        return {"tokens": ids} if self.engine == "vllm" else None

    def completed(self, content):
        if content["model"] != MODEL:
            return None
        choices = []
        for index, ids in enumerate(content["prompt"]):
            choice = {"index": index, "prompt_token_ids": ids}
            if "prompt_logprobs" in content:
                values = self._log_p(ids)
                rows = [{str(i): {"logprob": v}} for i, v in zip(ids[1:], values, strict=True)]
                choice |= {"prompt_logprobs": [None, *rows], "token_ids": [0]}
            else:
                made, ended = self._written(ids, content["max_tokens"], content)
                choice |= {"token_ids": made, "finish_reason": "stop" if ended else "length"}
            choices.append(self.change(choice))
        if "prompt_logprobs" not in content:
            self.sent.append(content)
        return {"choices": choices}

    def generated(self, content):
        how, out = content["sampling_params"], []
        for ids in content["input_ids"]:
            if content.get("return_logprob"):
                values = [None, *self._log_p(ids)]
                rows = [[v, i, None] for v, i in zip(values, ids, strict=True)]
                out.append({"text": "", "meta_info": {"input_token_logprobs": rows}})
                continue
            made, ended = self._written(ids, how["max_new_tokens"], how)
            about = {"finish_reason": {"type": "stop" if ended else "length"}}
            out.append({"text": "", "output_ids": made, "meta_info": about})
        return out

    @torch.inference_mode()
    def _log_p(self, ids):
        logits = self.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return logits.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    @torch.inference_mode()
    def _written(self, ids, most, how):
        assert how["temperature"] == 0 and how["repetition_penalty"] == 1
        assert len(ids) + most <= self.context  # where a real one refuses
        made, cache, fresh = [], None, ids
        while len(made) < most:
            step = self.model(torch.tensor([fresh]), past_key_values=cache, use_cache=True)
            cache, fresh = step.past_key_values, [int(step.logits[0, -1].argmax())]
            made += fresh
            text = self.tokenizer.decode(made)
            if made[-1] in how["stop_token_ids"] or any(stop in text for stop in how["stop"]):
                return made, True
        return made, False
