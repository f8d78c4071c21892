"""Which blocks of a model ZeRO-3 gathers as one."""

from torch import nn

from rlhf_core.training.moe import expert_blocks


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(2, 2)
        self.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])


class Sliced(nn.Module):
    """As in Transformers 5: one module with the weights of all."""

    def __init__(self):
        super().__init__()
        self.experts = nn.Linear(2, 2)


def test_blocks_whose_experts_are_modules_are_found():
    listed = Listed()
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2), listed, Sliced()])})

    assert list(expert_blocks(model)) == [listed]
