import pytest
import torch

from rlhf_core.errors import TrainingError
from rlhf_core.training.liger import check_liger


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_kernels_for_gpus_are_refused_without_one():
    with pytest.raises(TrainingError, match=r"ds\.use_liger_kernel needs a GPU.*remove it"):
        check_liger()
