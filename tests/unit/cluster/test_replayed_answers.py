"""Whether a tokenizer reads answers as they were said."""

from dataclasses import replace

import numpy as np
import pytest
from cluster_samples import failed, row

from rlhf_core.cluster.scoring_worker import check_answers
from rlhf_core.errors import ConfigError


class Letters:
    """Token 97 is an a, and so on."""

    def decode(self, token_ids, *, skip_special_tokens=False):
        return "".join(map(chr, token_ids))


def said(text, tokens):
    return replace(row(answer=len(tokens)), answer=text, token_ids=np.array([1, 2, *tokens], np.int32))


def test_tokens_that_read_as_was_said_are_accepted_and_what_failed_is_passed_over():
    check_answers([failed(), said("ab", [97, 98])], Letters(), "builtin:tiny")


def test_tokens_of_another_tokenizer_are_refused():
    with pytest.raises(ConfigError, match="reads the tokens of group g0 as 'ac', the run that sampled them said 'ab'"):
        check_answers([said("ab", [97, 99])], Letters(), "builtin:tiny")
