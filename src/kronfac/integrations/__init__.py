"""kronfac in other libraries, one module each; a library is imported when its module's function is called.

`transformers`: the Trainer. `lightning`: gradient clipping in half precision. `skorch`: an optimizer for
its nets. `timm`: `opt="kfac"`. `deepxde` and `pina`: residuals of differential equations that K-FAC
can see.
"""
