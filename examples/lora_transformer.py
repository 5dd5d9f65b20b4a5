"""Private LoRA fine-tuning of a Hugging Face transformer with ghost clipping, without wrapping it.

Only adapters and the classification head are trained. ``wrap_model=False`` leaves the model as
Transformers and PEFT made it, and ghost clipping builds no per-sample gradient. The transformer is
a tiny BERT built from a config, so nothing is downloaded; in real use it comes from
``AutoModelForSequenceClassification.from_pretrained``, pre-trained on public data. The documents
are made up: a class prefers some words::

    python examples/lora_transformer.py
    python examples/lora_transformer.py --rank 8 --target-modules query key value

In ghost mode the optimizer must hold every trainable parameter, and each of them must take part in
every forward pass. LoRA's layers and the head do; everything else is frozen.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

from opacus_slaclip import PrivacyEngine

VOCABULARY, NUM_CLASSES, MAX_LENGTH = 200, 4, 24  # token 0 is padding


def make_documents(count: int, seed: int) -> TensorDataset:
    """Return documents as (tokens, attention mask, class); a class has words of its own."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(NUM_CLASSES, (count,), generator=generator)
    common = torch.randint(1, VOCABULARY, (count, MAX_LENGTH), generator=generator)
    own = 1 + labels[:, None] + NUM_CLASSES * torch.randint(12, common.shape, generator=generator)
    tokens = torch.where(torch.rand(common.shape, generator=generator) < 0.5, own, common)
    lengths = torch.randint(MAX_LENGTH // 2, MAX_LENGTH + 1, (count, 1), generator=generator)
    mask = (torch.arange(MAX_LENGTH) < lengths).long()
    return TensorDataset(tokens * mask, mask, labels)


def build_model(rank: int, target_modules: list[str]) -> Any:
    """Return a tiny BERT with LoRA adapters and a trainable head, all else frozen."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.1,  # the default suits pre-training, not a frozen random model
        num_labels=NUM_CLASSES,
    )
    lora = LoraConfig(
        task_type="SEQ_CLS",
        r=rank,
        lora_alpha=2 * rank,
        target_modules=target_modules,
        modules_to_save=["classifier"],
    )
    return get_peft_model(BertForSequenceClassification(config), lora)


def accuracy(model: nn.Module, test: Dataset, device: str) -> float:
    model.eval()
    correct = total = 0
    with torch.no_grad():
        for batch in DataLoader(test, batch_size=256):
            tokens, mask, labels = (tensor.to(device) for tensor in batch)
            predicted = model(input_ids=tokens, attention_mask=mask).logits.argmax(1)
            correct += int((predicted == labels).sum())
            total += len(labels)
    return correct / total


def main() -> None:
    args = parse()
    train, test = make_documents(args.documents, seed=1), make_documents(500, seed=2)
    if args.seed is not None:
        torch.manual_seed(args.seed)
    model = build_model(args.rank, args.target_modules).to(args.device).train()
    trainable = [p for p in model.parameters() if p.requires_grad]
    counts = [sum(p.numel() for p in group) for group in (trainable, model.parameters())]
    print(f"{counts[0]:,} of {counts[1]:,} parameters are trained")
    engine = PrivacyEngine()
    hooks, optimizer, criterion, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.AdamW(trainable, lr=args.lr),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(train, batch_size=args.batch_size),
        noise_multiplier=args.noise_multiplier,
        max_grad_norm=args.max_grad_norm,
        clipping=args.clipping,
        grad_sample_mode="ghost",
        wrap_model=False,
    )
    for epoch in range(1, args.epochs + 1):
        model.train()
        for batch in loader:
            tokens, mask, labels = (tensor.to(args.device) for tensor in batch)
            optimizer.zero_grad()
            logits = model(input_ids=tokens, attention_mask=mask).logits
            criterion(logits, labels).backward()  # two passes: norms, then the clipped sum
            optimizer.step()
        epsilon = engine.get_epsilon(args.delta)
        print(f"epoch {epoch}: C = {optimizer.max_grad_norm:.4g}, epsilon = {epsilon:.3f}")
    hooks.cleanup()  # from here on it is the model that PEFT made; model.save_pretrained works
    print(
        f"test accuracy = {accuracy(model, test, args.device):.3f}, "
        f"epsilon = {engine.get_epsilon(args.delta):.3f} at delta = {args.delta:g}, "
        f"C: {args.max_grad_norm:.4g} -> {optimizer.max_grad_norm:.4g}"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--documents", type=int, default=4096, help="documents for training (4096)")
    add("--rank", type=int, default=4, help="rank of the adapters (4)")
    add("--target-modules", nargs="+", default=["query", "value"], help="layers (query value)")
    add("--clipping", choices=["flat", "slaclip", "slaclip-q"], default="slaclip")
    add("--max-grad-norm", type=float, default=1.0, metavar="C_0", help="initial threshold (1.0)")
    add("--noise-multiplier", type=float, default=1.0, help="noise per threshold (1.0)")
    add("--delta", type=float, default=1e-5, help="delta of the budget (1e-5)")
    add("--epochs", type=int, default=5, help="number of epochs (5)")
    add("--batch-size", type=int, default=256, help="expected batch size (256)")
    add("--lr", type=float, default=1e-2, help="learning rate of AdamW (0.01)")
    add("--seed", type=int, help="repeatable, so not private: for experiments only (none)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


if __name__ == "__main__":
    main()
