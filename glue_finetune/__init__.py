"""Fine-tune a pretrained model on GLUE with sketched linear layers: ``python -m glue_finetune --help``."""
