"""Prompts with images: their tokens and patches, rows that are refused, and what attackers put into image files."""

import base64
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from hybridrl.algos.partition.row_images import IMAGE_DATA, IMAGE_INPUTS
from hybridrl.cli.__main__ import main
from hybridrl.config.schema.data import DataConfig
from hybridrl.config.schema.preference import DPODataConfig
from hybridrl.config.schema.sft import SFTDataConfig
from hybridrl.errors import DataError
from hybridrl.protocol import DataProto
from hybridrl.trainer.data.prompt_dataset import RLHFDataset, collate_fn
from hybridrl.trainer.data.row_files import prompt_table, write_table
from hybridrl.trainer.run.samples import small_copies
from hybridrl.trainer.supervised.preference import mismatched_rows
from hybridrl.trainer.supervised.preference_data import LabelDataset, PairDataset
from hybridrl.trainer.supervised.sft import SFTDataset
from hybridrl.workers.engine.image_model import pixels_of
from hybridrl.workers.images import ImageProcessor, decoded_image
from tests.support.trainer.letter_tokenizer import letter_tokenizer
from tests.support.workers.image_attacks import ATTACKS, encoded
from tests.support.workers.image_cases import TEXTS, build_model, picture, read_processor

CONFIG = DataConfig(max_prompt_length=64)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(build_model(tmp_path_factory.mktemp("model"), texts=TEXTS))


def write(path: Path, *rows: dict) -> str:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return str(path)


def load(model: str, file: str, config: DataConfig = CONFIG) -> RLHFDataset:
    tokenizer, processor = read_processor(model)
    return RLHFDataset(file, tokenizer, config, processor)


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def image_row(entry: Any, text: str = "<image>What is it ?") -> dict:
    return {"prompt": user(text), "images": [entry]}


def test_tokens_and_patches_of_a_row_are_of_one_call_of_the_processor(tmp_path, model):
    """32x48 pixels have 2x3 tokens of 16x16 pixels, and each token 4 patches of 8x8."""
    images = [encoded(picture(1, width=32, height=48)), encoded(picture(2, width=16, height=16))]
    dataset = load(model, write(tmp_path / "a.parquet", {"prompt": user("is <image> it <image> ?"), "images": images}))
    row, (_, processor) = dataset[0], read_processor(model)
    found = row[IMAGE_INPUTS]
    assert found["image_grid_thw"].tolist() == [[1, 6, 4], [1, 2, 2]] and found["image_tokens"].tolist() == [6, 1]
    pixels = pixels_of(found)
    assert pixels.shape == (28, 3 * 2 * 8 * 8) and pixels.dtype == np.float32
    tokens = row["input_ids"].tolist()
    for start, number in zip(found["image_starts"], found["image_tokens"], strict=True):
        assert tokens[start : start + number] == [processor.token_id] * number
    assert tokens.count(processor.token_id) == 7
    assert row[IMAGE_DATA] == {"images": images} and row["raw_prompt"] == user("is <image> it <image> ?")


def test_every_form_of_an_image_and_of_a_prompt_gives_the_same_row(tmp_path, model):
    png = encoded(picture(1))
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "1.png").write_bytes(png)
    blocks = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it ?"}]}]
    forms = [
        image_row(png),
        image_row({"bytes": png, "path": None}),
        image_row({"bytes": None, "path": "pictures/1.png"}),
        image_row("pictures/1.png"),
        image_row(png, "What is it ?"),  # TRL's: no tag, and the images come first
        {"prompt": user("What is it ?"), "image": {"bytes": png, "path": None}},
        {"prompt": blocks, "images": [png]},
    ]
    rows = [load(model, write(tmp_path / f"{i}.parquet", form))[0] for i, form in enumerate(forms)]
    write_table(
        prompt_table([{"prompt": user("<image>What is it ?"), "images": [picture(1)]}]), str(tmp_path / "own.parquet")
    )
    rows.append(load(model, str(tmp_path / "own.parquet"))[0])  # an image of Pillow in a Python row
    assert len({tuple(row["raw_prompt_ids"]) for row in rows}) == 1
    assert len({int(row[IMAGE_INPUTS]["image_hashes"][0]) for row in rows}) == 1


def test_the_images_of_a_file_in_the_home_directory_are_beside_it(tmp_path, model, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "1.png").write_bytes(encoded(picture(1)))
    write(tmp_path / "a.parquet", image_row("1.png"))
    assert load(model, "~/a.parquet")[0][IMAGE_DATA] == {"images": [encoded(picture(1))]}


def test_rows_without_images_are_tokenized_as_without_a_processor(tmp_path, model):
    file = write(tmp_path / "a.parquet", {"prompt": user("What is it ?")}, {"prompt": user("no picture")})
    tokenizer, _ = read_processor(model)
    alone = RLHFDataset(file, tokenizer, CONFIG)
    dataset = load(model, file)
    for i in range(2):
        assert dataset[i].keys() == alone[i].keys() and dataset[i]["raw_prompt_ids"] == alone[i]["raw_prompt_ids"]


def test_the_samples_of_a_prompt_share_its_pixels_also_between_processes(tmp_path, model):
    rows = [image_row(encoded(picture(i, width=64, height=64))) for i in range(2)] + [{"prompt": user("no picture")}]
    dataset = load(model, write(tmp_path / "a.parquet", *rows))
    batch = collate_fn([dataset[i] for i in range(3)], 0)
    assert batch.non_tensor_batch[IMAGE_INPUTS][2] is None
    one, many = (pickle.dumps(batch.repeat(n, interleave=True), protocol=5) for n in (1, 8))
    patches = pixels_of(batch.non_tensor_batch[IMAGE_INPUTS][0]).nbytes
    assert len(many) - len(one) < patches / 4
    again = pickle.loads(many).non_tensor_batch[IMAGE_INPUTS]
    assert again[0] is again[7] and again[0] is not again[8]
    buffers: list = []
    pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    assert sum(buffer.raw().nbytes == patches for buffer in buffers) == 2  # out of band
    batch.save_to_disk(tmp_path / "batch")
    stored = DataProto.load_from_disk(tmp_path / "batch").non_tensor_batch[IMAGE_INPUTS]
    assert np.array_equal(pixels_of(stored[0]), pixels_of(batch.non_tensor_batch[IMAGE_INPUTS][0]))


def test_lengths_are_counted_with_the_tokens_of_images_which_are_never_cut(tmp_path, model):
    rows = [image_row(encoded(picture(1, width=side, height=side))) for side in (32, 96)]  # 4 and 36 tokens
    file = write(tmp_path / "a.parquet", *rows)
    length = len(load(model, file)[0]["raw_prompt_ids"])
    tight = DataConfig(max_prompt_length=length)
    for settings in ({}, {"truncation": "left"}):
        with pytest.raises(
            DataError, match=f"a.parquet row 1: .* {length + 32} tokens.*data.max_prompt_length={length}"
        ):
            load(model, file, replace(tight, **settings))
    assert len(load(model, file, replace(tight, filter_overlong_prompts=True))) == 1
    tokenizer, processor = read_processor(model)
    smaller = ImageProcessor(
        model, tokenizer, options={"max_pixels": 32 * 32}, max_images=8, token_id=processor.token_id
    )
    assert [len(RLHFDataset(file, tokenizer, tight, smaller)[i]["raw_prompt_ids"]) for i in range(2)] == [length] * 2


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_image_that_cannot_be_read_stops_the_run_before_it_starts(tmp_path, model, attack):
    entry, message = ATTACKS[attack]
    file = write(tmp_path / "a.parquet", image_row(encoded(picture(1))), image_row(entry))
    with pytest.raises(DataError, match=f"a.parquet row 1: .*({message})"):
        load(model, file)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("../secret.png", "is not in the folder of its data file"),
        ("/etc/passwd", "is not in the folder of its data file"),
        ("link.png", "is not in the folder of its data file"),
        ("gone.png", "cannot be read"),
        ("http://localhost:1/a.png", "is an address; images are not fetched"),
        ("file:///etc/passwd", "is an address; images are not fetched"),
        ("data:image/png;base64,AAAA", "is an address; images are not fetched"),
        ("a\0b.png", "cannot be read|is not in the folder"),
    ],
)
def test_a_path_that_is_no_file_beside_the_data_is_refused(tmp_path, model, path, message):
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "secret.png").write_bytes(encoded(picture(1)))
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(DataError, match=f"a.parquet row 0: .*({message})"):
        load(model, write(folder / "a.parquet", image_row(path)))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": user("What"), "images": [encoded(picture(1))] * 1000},
            "has 1000 images, more than data.max_images",
        ),
        (image_row(encoded(picture(1)), "<image><image>What"), "mentions 2 images .*, and the row has 1"),
        ({"prompt": user("<image>What"), "images": []}, "mentions 1 images .*, and the row has 0"),
        (image_row(encoded(picture(1)), "<image> <|image_pad|>"), "writes 2 times <|image_pad|> for 1 images"),
        ({"prompt": user("<|image_pad|>"), "images": []}, "writes 1 times <|image_pad|> for 0 images"),
        ({"prompt": user("<video>What"), "images": []}, "videos and audio are not read"),
        ({"prompt": user("What"), "videos": ["a.mp4"]}, "has videos, which are not read"),
    ],
)
def test_a_prompt_that_does_not_fit_its_images_is_refused(tmp_path, model, row, message):
    with pytest.raises(DataError, match=f"row 0.*{message}".replace("|", r"\|")):
        load(model, write(tmp_path / "a.parquet", row))


def test_a_model_of_text_refuses_images(tmp_path):
    with pytest.raises(DataError, match="'images' .*, and the model, or this program, reads text only"):
        RLHFDataset(write(tmp_path / "a.parquet", image_row(encoded(picture(1)))), letter_tokenizer(), CONFIG)


def test_transparent_parts_are_white_and_a_photograph_is_upright():
    clear = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    assert decoded_image(encoded(clear), "row").getpixel((0, 0)) == (255, 255, 255)
    turned = Image.new("RGB", (8, 4))
    exif = turned.getexif()
    exif[0x0112] = 6  # the camera was turned by 90 degrees
    assert decoded_image(encoded(turned, "JPEG", exif=exif), "row").size == (4, 8)


def talk(text: str, answer: str) -> list[dict]:
    return [*user(text), {"role": "assistant", "content": answer}]


def load_talks(model: str, file: str, **settings: Any) -> SFTDataset:
    tokenizer, processor = read_processor(model)
    return SFTDataset(file, tokenizer, SFTDataConfig(**{"max_length": 64} | settings), processor=processor)


def test_a_conversation_with_images_is_that_of_a_prompt_and_its_answer_and_trains_the_answer_alone(tmp_path, model):
    images = [encoded(picture(1, width=32, height=48)), encoded(picture(2, width=16, height=16))]
    rows = [{"messages": talk("is <image> it <image> ?", "a b"), "images": images}, {"messages": talk("no", "c")}]
    dataset = load_talks(model, write(tmp_path / "a.parquet", *rows))
    prompt = load(model, write(tmp_path / "b.parquet", {"prompt": rows[0]["messages"][:1], "images": images}))[0]
    batch = dataset.collate([dataset[0], dataset[1]])
    real = batch.batch["input_ids"][0][batch.batch["attention_mask"][0].bool()].tolist()
    length = len(prompt["raw_prompt_ids"])
    assert real[:length] == prompt["raw_prompt_ids"]
    trained = batch.batch["responses"][0][batch.batch["response_mask"][0].bool()].tolist()
    assert trained == real[length : length + 3] == read_processor(model)[0]("a b <|im_end|>")["input_ids"]
    column = batch.non_tensor_batch[IMAGE_INPUTS]
    assert np.array_equal(pixels_of(column[0]), pixels_of(prompt[IMAGE_INPUTS])) and column[1] is None


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"messages": talk("a", "<image>b")}, {}, "row 0: the assistant answers with an image"),
        ({"messages": talk("<image>a", "b")}, {"max_length": 8}, "row 0: a conversation of 14 tokens"),
        ({"messages": talk("<image>a", "b")}, {"max_length": 8, "truncation": "left"}, "14 tokens.*is not cut"),
    ],
)
def test_a_conversation_is_refused_whose_images_would_be_trained_or_cut(tmp_path, model, row, settings, message):
    with pytest.raises(DataError, match=message):
        load_talks(model, write(tmp_path / "a.parquet", row | {"images": [encoded(picture(1))]}), **settings)


@pytest.mark.parametrize("is_pair", [True, False])
def test_the_responses_of_a_preference_share_the_images_of_their_prompt(tmp_path, model, is_pair):
    own = {"chosen": "a", "rejected": "b c"} if is_pair else {"completion": "a", "label": True}
    rows = [{"prompt": "<image>What is it ?", **own, "image": encoded(picture(i))} for i in range(2)]
    file = write(tmp_path / "a.parquet", *rows)
    tokenizer, processor = read_processor(model)
    dataset = (PairDataset if is_pair else LabelDataset)(file, tokenizer, DPODataConfig(), processor=processor)
    prompt = load(model, write(tmp_path / "b.parquet", image_row(rows[0]["image"])))[0]
    batch = dataset.collate([dataset[i] for i in range(2)])
    column = batch.non_tensor_batch[IMAGE_INPUTS]
    assert batch.batch["input_ids"][0, : len(prompt["raw_prompt_ids"])].tolist() == prompt["raw_prompt_ids"]
    assert int(batch.batch["response_mask"][0].sum()) == 2  # a <|im_end|>
    assert np.array_equal(pixels_of(column[0]), pixels_of(prompt[IMAGE_INPUTS]))
    assert (column[0] is column[1]) == is_pair
    if not is_pair:
        mismatched = mismatched_rows(batch, max_length=64)
        assert mismatched.non_tensor_batch[IMAGE_INPUTS].tolist() == column.tolist()


def test_inspect_counts_images_their_sizes_and_their_tokens(tmp_path, model, capsys):
    rows = [image_row(encoded(picture(i, width=16 * (i + 1), height=16))) for i in range(3)]
    file = write(tmp_path / "a.parquet", *rows, {"prompt": user("no picture")})
    assert main(["data", "inspect", file, "--model", model]) == 0
    printed = capsys.readouterr().out
    assert "images: 3 in 3 of 4 rows, at most 1 in one; pixels: half 32x16, 95 % 32x16, longest 48x16" in printed
    assert "of these of the images of a row: half 1, 95 % 2, longest 2" in printed
    file = write(tmp_path / "b.parquet", *rows, image_row(encoded(picture(1))[:200]), image_row(b"no"))
    assert main(["data", "inspect", file]) == 1
    assert "row 3: an image is damaged" in (printed := capsys.readouterr().out) and "row 4: 2 bytes" in printed


def test_samples_keep_small_copies_of_their_images_for_the_page(tmp_path, model):
    rows = [image_row(encoded(picture(1, width=512, height=256))), {"prompt": user("no picture")}]
    dataset = load(model, write(tmp_path / "a.parquet", *rows), DataConfig(max_prompt_length=999))
    batch = collate_fn([dataset[i] for i in range(2)], 0).repeat(2, interleave=True)
    copies = small_copies(batch)
    assert copies.keys() == {0, 1} and copies[0] is copies[1]
    [uri] = copies[0]
    head, _, data = uri.partition(",")
    assert head == "data:image/jpeg;base64"
    assert decoded_image(base64.b64decode(data), "copy").size == (256, 128)
