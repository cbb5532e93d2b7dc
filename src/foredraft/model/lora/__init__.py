"""LoRAs: low-rank changes of a model's weights, merged while the weights are read.

    record.py        the folder of a model with LoRAs: which model, which LoRAs
    lora_config.py   adapter_config.json -> what a LoRA is; refuses what is not built
    lora_tensors.py  adapter_model.safetensors -> the changes of each module
    finding.py       a change -> the model's tensor that it fits
    merging.py       the model's tensors with all changes
    opening.py       the LoRAs of a folder, merged into its model's open files
    folder.py        a model's folder and LoRAs -> a checkpoint folder
    download.py      a name -> the local folder of a LoRA

Format: https://github.com/huggingface/peft, as `PeftModel.save_pretrained` writes it; Hu et al. 2021
(arXiv:2106.09685). A merged weight is W + Σ s·B·A, with s = α/r, or α/√r where the LoRA says so
(`use_rslora`; Kalajdzievski 2023, arXiv:2312.03732).
"""
