"""The training process: model, inner loop and its protocol. Only the modules that train import
torch.
"""
