"""The draft's vocabulary: what the target says most, control tokens always, sizes that make no sense refused."""

import pytest
import torch

from nonet.draft.answers import Answer, Row
from nonet.draft.vocabulary import choose, control_tokens
from nonet.types import UserError


def answer(prompt: list[int], written: list[int]) -> Answer:
    tokens = (*prompt, *written)
    return Answer("a", "data", False, (Row(tokens, ((len(prompt), len(tokens)),)),), 1, 1, "done")


ANSWERS = [answer([9, 9, 9, 9], [5, 5, 7]), answer([8], [5, 3, 7])]


def test_what_the_target_wrote_goes_before_what_it_read():
    assert choose(ANSWERS, 3, 20, ()).d2t_W.tolist() == [3, 5, 7]
    assert choose(ANSWERS, 4, 20, ()).d2t_W.tolist() == [3, 5, 7, 9]
    assert choose(ANSWERS, 7, 20, ()).d2t_W.tolist() == [0, 1, 3, 5, 7, 8, 9]


def test_control_tokens_are_always_in_and_ids_ascend():
    got = choose(ANSWERS, 3, 20, {19, 0}).d2t_W
    assert got.tolist() == [0, 5, 19] and got.dtype == torch.int64


def test_coverage_is_of_written_tokens():
    assert choose(ANSWERS, 2, 20, ()).coverage == pytest.approx(5 / 6)
    assert choose(ANSWERS, 20, 20, ()).d2t_W is None


@pytest.mark.parametrize("size", [-1, 0, 21])
def test_a_size_that_makes_no_sense_is_refused(size):
    with pytest.raises(UserError, match=rf"draft_vocab = {size}: must be from 1 to the target's 20"):
        choose(ANSWERS, size, 20, ())


def test_no_room_for_control_tokens_and_no_answers_are_refused():
    with pytest.raises(UserError, match="no room for the 3 control tokens"):
        choose(ANSWERS, 2, 20, {1, 2, 3})
    with pytest.raises(UserError, match="wrote no token"):
        choose([], 2, 20, ())


def test_control_tokens_of_a_tokenizer_hold_its_ends(nano):
    assert set(nano.stop_ids) <= control_tokens(nano)
