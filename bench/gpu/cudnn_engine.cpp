// SPDX-License-Identifier: Apache-2.0

// The one file of the program that includes cuDNN's frontend.
#include <ulysses/adapters/cudnn/engine.hpp>
