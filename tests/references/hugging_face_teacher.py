"""A small random Llama of transformers as a teacher, compared with itself.

    pip install 'jaxlm[hf]'
    python tests/references/hugging_face_teacher.py

Builds the model and a tokenizer, prepares a little text, caches what the model predicts through
scripts/cache_teacher.py, and compares each record with the model's own distribution, computed
document by document; then the divergence of a random student from the cache and from the model.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxlm.data.shards import DataDirectory, ShardWriter
from jaxlm.data.teacher import TeacherCache
from jaxlm.data.tokenizer import train_tokenizer
from jaxlm.losses import TeacherRecords, chunked_cross_entropy

ROOT = Path(__file__).parents[2]
K, LENGTH, OVERLAP = 16, 48, 12
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def build(folder):
    """A data directory, and a model with its tokenizer in a folder."""
    import tokenizers
    import torch
    import transformers

    documents = [part for part in TEXT.split("\n\n") if len(part) > 10]
    tokenizer = train_tokenizer(documents, 400)
    with ShardWriter(
        folder / "data",
        vocabulary_size=400,
        end_id=tokenizer.end_id,
        end_token=tokenizer.end_token,
        tokenizer=(tokenizer.file_name, tokenizer.content),
    ) as writer:
        for i, ids in enumerate(tokenizer.encode(documents)):
            writer.add("validation" if i % 10 == 9 else "train", ids)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=408,  # padded, as many are
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.3,
        )
    )
    model.save_pretrained(folder / "llama")
    backend = tokenizers.Tokenizer.from_buffer(tokenizer.content)
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    wrapped.save_pretrained(folder / "llama")
    return DataDirectory(folder / "data"), model.eval()


def live(model, stream):
    """Log-probabilities [documents' tokens, 400] of the model itself, NaN at first tokens."""
    import torch

    rows, begin = np.full((len(stream), 400), np.nan), 0
    for end in stream.document_ends.tolist():
        tokens, start = stream.read(begin, end).astype(np.int64), 0
        while start < len(tokens) - 1:
            window = tokens[start : start + LENGTH]
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor(window)[None]).logits[0, :, :400]
            log_p = torch.log_softmax(logits.double(), -1).numpy()
            first = 0 if start == 0 else OVERLAP
            stop = min(len(window), len(tokens) - 1 - start)
            rows[begin + start + first + 1 : begin + start + stop + 1] = log_p[first:stop]
            start += LENGTH - OVERLAP
            if start + OVERLAP >= len(tokens) - 1:
                break
        begin = end
    return rows


def main():
    """Compare, and print the largest differences."""
    folder = Path(tempfile.mkdtemp())
    data, model = build(folder)
    for dtype, weights in (("float32", "float32"), ("float16", "float32")):
        command = [sys.executable, str(ROOT / "scripts/cache_teacher.py")]
        command += ["--data", str(data.directory), "--hf", str(folder / "llama"), "--name", dtype]
        command += ["--k", str(K), "--dtype", dtype, "--weights", weights, "--batch-rows", "4"]
        command += ["--length", str(LENGTH), "--overlap", str(OVERLAP)]
        subprocess.run(command, check=True)
        stream = data.stream("train")
        expected = live(model, stream)
        known = np.flatnonzero(np.isfinite(expected[:, 0]))
        cache = TeacherCache(data.directory / f"teacher-{dtype}", data, stream, 1, len(stream))
        one = np.ones(len(known), np.int64)
        read = cache.read((len(known), 1), np.arange(len(known)), 0 * one, known, one)
        ids = read["teacher_ids"][:, 0].astype(int)
        chosen = np.take_along_axis(expected[known], ids, -1)
        masses = np.exp(expected[known])
        np.put_along_axis(masses, ids, 0.0, -1)
        rest = np.log(masses.sum(-1))
        rng = np.random.default_rng(0)
        hidden, head = (
            jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((len(known), 16), (400, 16))
        )

        def divergence(records, hidden=hidden, head=head):
            n = len(hidden)
            sums = chunked_cross_entropy(
                hidden, head, jnp.zeros(n, int), jnp.ones(n), chunk_tokens=256, teacher=records
            )
            return float(sums.distillation) / n

        from_cache = divergence(
            TeacherRecords(
                *(jnp.asarray(read[f"teacher_{n}"][:, 0]) for n in ("ids", "log_probs", "log_tail"))
            )
        )
        from_model = divergence(
            TeacherRecords(jnp.asarray(ids), *(jnp.asarray(x, jnp.float32) for x in (chosen, rest)))
        )
        print(
            f"{dtype}: {len(known)} of {len(stream)} positions; largest difference of a "
            f"log-probability {np.abs(read['teacher_log_probs'][:, 0] - chosen).max():.1e}, of the "
            f"rest {np.abs(read['teacher_log_tail'][:, 0] - rest).max():.1e}; divergence of a "
            f"student {from_cache:.6f} from the cache, {from_model:.6f} from the model"
        )
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
