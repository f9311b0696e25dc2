"""A local server that has a real tiny model and answers as vLLM or SGLang would: greedily, one
prompt and one token at a time, so that nothing of ours is in what it writes."""

import math
import threading
import zlib
from typing import NamedTuple

import jinja2
import torch
from score.server_kit import MODEL, Refusal, Replay
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from vocagnolm.alignment import load_tokenizer


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


class Step(NamedTuple):
    """A token that was drawn, and what was said of all of them."""

    token: int
    log_p: torch.Tensor


class LiveWriter(Live):
    """A server that draws, as vLLM, as SGLang and as a chat endpoint. The n-th answer to a prompt
    is always the same, whatever else is asked."""

    def __init__(self, folder, engine="vllm"):
        super().__init__(folder, engine)
        self.template = jinja2.Template((folder / "chat_template.jinja").read_text())
        self.texts = load_tokenizer(str(folder), check=False)
        self.ends = {self.tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|eot|>")} - {None}
        self.model_lock = threading.Lock()
        self.raw = True
        """False: log probabilities are those of the distribution that it draws from."""
        self.given = []
        """Ids of the prompt and of the answer, for every answer."""
        self.asked = []
        self.bodies = []
        """Every request to the chat endpoint."""
        self.most_likely, self.has_n, self.numbers = 20, True, True
        self.change_chat = lambda choice: choice
        self.refuses = lambda body: None
        """What it refuses a chat request for."""

    @torch.inference_mode()
    def drawn(self, ids, most, how, ends, number):
        """Steps of the answer with this number, and whether it came to its end by itself."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{ids} {number}".encode()))
        temperature, top_p = how.get("temperature", 1.0), how.get("top_p", 1.0)
        steps, cache, fresh = [], None, list(ids)
        while len(steps) < most:
            with self.model_lock:
                out = self.model(torch.tensor([fresh]), past_key_values=cache, use_cache=True)
            cache, logits = out.past_key_values, out.logits[0, -1].float()
            hot = (logits / (temperature or 1.0)).log_softmax(-1)
            if top_p < 1:
                order = hot.argsort(descending=True)
                beyond = hot[order].exp().cumsum(0) - hot[order].exp() >= top_p
                hot[order[beyond]] = -math.inf
                hot = hot.log_softmax(-1)
            token = int(torch.multinomial(hot.exp(), 1, generator=generator))
            token = token if temperature else int(logits.argmax())
            steps.append(Step(token, logits.log_softmax(-1) if self.raw else hot))
            fresh = [token]
            text = self.tokenizer.decode([step.token for step in steps], skip_special_tokens=False)
            if token in ends or any(stop in text for stop in how.get("stop") or ()):
                return steps, True
        return steps, False

    def _gone_on(self, ids, most, how, number):
        steps, ended = self.drawn(ids, most, how, set(how["stop_token_ids"]), number)
        assert len(ids) + most <= self.context
        self.given.append((list(ids), [step.token for step in steps]))
        return steps, ended

    def completed(self, content):
        if "prompt_logprobs" in content or not content["temperature"]:
            return super().completed(content)
        if content.get("logprobs", 0) > self.max_logprobs:
            return Refusal(f"Requested sample logprobs of {content['logprobs']}: max allowed is 20")
        choices = []
        for ids in content["prompt"]:
            for number in range(content.get("n", 1)):
                steps, ended = self._gone_on(ids, content["max_tokens"], content, number)
                choice = {"index": len(choices), "prompt_token_ids": ids}
                choice |= {"token_ids": [s.token for s in steps], "text": "?"}
                choice |= {"finish_reason": "stop" if ended else "length"}
                if (count := content.get("logprobs")) is not None:
                    choice["logprobs"] = {
                        "token_logprobs": [float(s.log_p[s.token]) for s in steps],
                        "top_logprobs": [
                            {f"token_id:{n}": v for n, v in _listed(s, count, own=True)}
                            for s in steps
                        ],
                    }
                choices.append(self.change(choice))
        return {"choices": choices}

    def generated(self, content):
        how = content["sampling_params"]
        if not how["temperature"]:
            return super().generated(content)
        out = []
        for place, ids in enumerate(content["input_ids"]):
            number = content["input_ids"][:place].count(ids)
            steps, ended = self._gone_on(ids, how["max_new_tokens"], how, number)
            about = {"finish_reason": {"type": "stop" if ended else "length"}}
            if content.get("return_logprob"):
                about["output_token_logprobs"] = [
                    [float(s.log_p[s.token]), s.token, None] for s in steps
                ]
                about["output_top_logprobs"] = [
                    [[v, n, None] for n, v in _likeliest(s, content["top_logprobs_num"])]
                    for s in steps
                ]
            made = [step.token for step in steps]
            out.append(self.change({"text": "?", "output_ids": made, "meta_info": about}))
        return out

    def chatted(self, content):
        """As vLLM does it: the drawn token is one of those that are listed, and the token that ends
        an answer is there, too."""
        self.bodies.append(content)
        if (why := self.refuses(content)) is not None:
            return Refusal(why)
        if content.get("top_logprobs", 0) > self.most_likely:
            return Refusal(f"top_logprobs must be at most {self.most_likely}")
        text = self.template.render(messages=content["messages"], add_generation_prompt=True)
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        choices = []
        for number in range(content.get("n", 1) if self.has_n else 1):
            with self.model_lock:
                before = 0 if self.has_n else self.asked.count(ids)
                self.asked.append(ids)
            drawn = self.drawn(ids, content["max_tokens"], content, self.ends, number + before)
            steps, ended = drawn
            made = [step.token for step in steps]
            self.given.append((ids, made))
            shown = made[:-1] if ended and made[-1] in self.ends else made
            said = b"".join(self.texts.bytes_of(n) or b"" for n in shown).decode("utf-8", "replace")
            for stop in content.get("stop", ()):
                said = said.partition(stop)[0]
            choice = {"index": number, "message": {"role": "assistant", "content": said}}
            choice |= {"finish_reason": "stop" if ended else "length", "logprobs": None}
            if content.get("logprobs") and self.numbers:
                count = content["top_logprobs"]
                choice["logprobs"] = {
                    "content": [
                        self._entry(s.token, s.log_p)
                        | {"top_logprobs": [self._entry(n, s.log_p) for n, _ in _listed(s, count)]}
                        for s in steps
                    ]
                }
            choices.append(self.change_chat(choice))
        new = sum(len(made) for _, made in self.given[-len(choices) :])
        return {"choices": choices, "usage": {"prompt_tokens": len(ids), "completion_tokens": new}}

    def _entry(self, token, log_p):
        data = self.texts.bytes_of(token)
        name = self.tokenizer.id_to_token(token) or ""
        data = name.encode() if data is None or token in self.ends else data
        text = data.decode("utf-8", "replace")
        return {"token": text, "bytes": list(data), "logprob": max(float(log_p[token]), -9999.0)}


def _likeliest(step, count):
    values, ids = step.log_p.topk(count)
    return [*zip(ids.tolist(), values.tolist(), strict=True)]


def _listed(step, count, own=False):
    """The likeliest tokens, the drawn one first; `own`: beside `count` others."""
    first = {step.token: float(step.log_p[step.token])}
    return list((first | dict(_likeliest(step, count))).items())[: count + own]
