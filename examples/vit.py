"""Train a vision transformer in a loop of your own: convert the model, then train as before.

python examples/vit.py                                                a small one on scikit-learn's digits
python examples/vit.py --model google/vit-base-patch16-224-in21k      a real one, from the hub
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import interpolate
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification

import rmm_linear

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a folder or a name of the hub; default: a small model with random weights")
parser.add_argument("--max_steps", type=int, default=150)
args = parser.parse_args()

torch.manual_seed(0)
if args.model:
    model = AutoModelForImageClassification.from_pretrained(args.model, num_labels=10, ignore_mismatched_sizes=True)
else:
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=10, **sizes))
model = model.to("cuda" if torch.cuda.is_available() else "cpu").train()

digits = load_digits()  # 1,797 images of 8 × 8 pixels
images = interpolate(torch.tensor(digits.images).float()[:, None] / 8 - 1, size=model.config.image_size)


def batch(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return some of the images, as the model takes them."""
    pixels, labels = images[rows].expand(-1, 3, -1, -1), torch.tensor(digits.target)[rows]
    return {"pixel_values": pixels.to(model.device), "labels": labels.to(model.device)}


report = rmm_linear.convert(model, example=batch(torch.arange(64)))
print(report.summary(), report.memory.line(), sep="\n")

optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5 if args.model else 3e-3)
for step in range(args.max_steps):
    loss = model(**batch(torch.randint(0, 1500, (64,)))).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 25 == 24:
        print(f"step {step + 1}: loss {loss.item():.3f}")

rmm_linear.revert(model.eval())  # exact again, with the trained weights
with torch.no_grad():
    others = batch(torch.arange(1500, len(images)))
    right = model(**others).logits.argmax(-1) == others["labels"]
print(f"Accuracy on other digits: {right.float().mean():.3f}")
