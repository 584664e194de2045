"""What llama.cpp makes of a GGUF file; run by the interpreter that has llama_cpp, so nothing of gnomon is imported here.

    python llama_cpp_peer.py MODEL.gguf OUT.npz STEPS TEXT ID ID …

Writes `logits` [prompt + steps, V], the greedy `continuation` [steps], and `ids` of the text by llama.cpp's own tokenizer.
"""

import sys

import numpy as np
from llama_cpp import GGML_TYPE_F32, Llama


def main():
    file, out, steps, text, *prompt = sys.argv[1:]
    model = Llama(file, n_ctx=512, n_batch=512, n_threads=1, n_gpu_layers=0, logits_all=True, verbose=False,
                  type_k=GGML_TYPE_F32, type_v=GGML_TYPE_F32)  # its default, fp16 latents, is another model by 2e-4
    model.eval([int(token) for token in prompt])
    continuation = []
    for _ in range(int(steps)):
        continuation.append(int(np.argmax(model.scores[model.n_tokens - 1])))
        model.eval(continuation[-1:])
    ids = model.tokenize(text.encode(), add_bos=False, special=False)
    np.savez(out, logits=model.scores[: model.n_tokens], continuation=continuation, ids=ids)


if __name__ == "__main__":
    main()
