"""LoRAs: low-rank changes of a model's weights, merged while the weights are read.

Format: https://github.com/huggingface/peft, as `PeftModel.save_pretrained` writes it; Hu et al. 2021
(arXiv:2106.09685). A merged weight is W + Σ s·B·A, with s = α/r, or α/√r where the LoRA says so
(`use_rslora`; Kalajdzievski 2023, arXiv:2312.03732).
"""
