"""A small model with every kind of linear layer."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gate = nn.Linear(width, 4)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(x))) * self.gate(x).amax(-1, keepdim=True)


class Model(nn.Module):
    """A model with every kind of layer that has to stay as it is."""

    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.first, self.second = Block(width), Block(width)
        self.again = self.second
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.wide = nn.Linear(width, width, dtype=torch.float64)
        self.hooked = nn.Linear(width, width)
        self.hooked.register_forward_hook(lambda *_: None)
        self.unused = nn.Linear(width, width)
        self.lm_head = nn.Linear(width, 16, bias=False)
        self.twin = nn.Linear(width, 16, bias=False)
        self.twin.weight = self.embed.weight

    def forward(self, tokens):
        x = self.again(self.first(self.embed(tokens)))
        x = self.attention(x, x, x, need_weights=False)[0] + self.hooked(x)
        return self.lm_head(x + self.wide(x.double()).float())


def model():
    torch.manual_seed(0)
    return Model().eval()


def tokens(seed=0):
    return torch.randint(16, (2, 5), generator=torch.Generator().manual_seed(seed))
