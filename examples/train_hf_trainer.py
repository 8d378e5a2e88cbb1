"""A HuggingFace `Trainer` script that knows nothing of fp4compile: flags alone bring it in.

    python examples/train_hf_trainer.py --output_dir out --max_steps 20 \
        --torch_compile --torch_compile_backend fp4compile_mxfp8

It trains a small Llama with random weights on its own source text. `python -m fp4compile run` before the script's name
makes it say at the end what was quantised.
"""

from pathlib import Path

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

LENGTH = 64


def samples() -> list[dict[str, torch.Tensor]]:
    text = torch.tensor(list(Path(__file__).read_bytes()))
    windows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    return [{"input_ids": window, "labels": window} for window in windows]


def main() -> None:
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    torch.manual_seed(arguments.seed)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=samples())
    trainer.train()


if __name__ == "__main__":
    main()
