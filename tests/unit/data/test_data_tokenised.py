"""From characters to the tokens that stand for them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.data.tokenised import tokenise
from rlhf_core.errors import DataError


def split_at(text, character, tokenizer):
    """The texts of the tokens on both sides of ``character``."""
    tokenised = tokenise(text, tokenizer)
    token = tokenised.token_at(character, "row 3")
    return tokenizer.decode(tokenised.token_ids[:token]), tokenizer.decode(tokenised.token_ids[token:])


@given(st.text(max_size=20), st.text(max_size=20))
def test_split_is_exact_where_no_token_crosses_it(tokenizer, before, after):
    assert split_at(before + after, len(before), tokenizer) == (before, after)


def test_bytes_of_one_character_stay_together(tokenizer):
    assert split_at("aé€b", 2, tokenizer) == ("aé", "€b")
    assert split_at("aé€b", 3, tokenizer) == ("aé€", "b")


def test_token_belongs_to_the_side_it_begins_on(byte_tokenizer):
    assert split_at("xhi", 1, byte_tokenizer(merges=["xh"])) == ("xh", "i")
    assert split_at("xhi", 2, byte_tokenizer(merges=["hi"])) == ("xhi", "")


@pytest.mark.parametrize("trim", [False, True])
def test_spaces_that_offsets_leave_out_count(byte_tokenizer, trim):
    """ "a hi": the tokens "a", " h", "i"; trimmed, the second one claims to begin at the h."""
    tokenizer = byte_tokenizer(merges=[" h"], trim=trim)

    assert split_at("a hi", 1, tokenizer) == ("a", " hi")
    assert split_at("a hi", 2, tokenizer) == ("a h", "i")  # " h" begins before the h
    assert split_at("a  7", 3, tokenizer) == ("a  ", "7")  # spaces of their own tokens


def test_slow_tokenizer_is_asked_for_the_tokens_before(slow_tokenizer):
    assert split_at("aé b", 2, slow_tokenizer) == ("aé", " b")
    assert split_at("aé", 2, slow_tokenizer) == ("aé", "")


def test_slow_tokenizer_refuses_a_token_that_crosses(byte_tokenizer):
    class Slow:
        """The fast one without its offsets."""

        is_fast = False
        encode = byte_tokenizer(merges=["hi"]).encode

    with pytest.raises(DataError, match=r"row 3: the slow tokenizer .* character 1, 'i': set data.disable_fast"):
        tokenise("hi", Slow()).token_at(1, "row 3")


def test_empty_text_has_no_tokens(tokenizer):
    assert tokenise("", tokenizer).token_at(0, "row 3") == 0
