#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "bad_input.hpp"
#include "weights.hpp"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

/// A trained model as a file: a line of text that names its shape, then its parameters as doubles of
/// this kind of machine, whatever type they were trained in.
namespace lm {

inline constexpr auto model_file_head = "ulysses-lm-1";

/// The file that a training run writes; it is opened before, so that a wrong name costs no training.
class model_file {
   public:
    /// *Throws* `bad_input` when the file cannot be written.
    explicit model_file(std::string const& path) : path_(path), file_(path, std::ios::binary) {
        if (!file_)
            throw bad_input("cannot write the model file '" + path +
                            "': " + std::generic_category().message(errno));
    }

    template <class T>
    void write(weights<T> const& w) {
        auto const& s = w.shape();
        file_ << model_file_head << ' ' << s.layers << ' ' << s.width << ' ' << s.heads << ' '
              << s.kv_heads << '\n';
        std::vector<double> const all(w.all().begin(), w.all().end());
        file_.write(reinterpret_cast<char const*>(all.data()),
                    static_cast<std::streamsize>(all.size() * sizeof(double)));
        file_.close();
        if (!file_) throw std::runtime_error("cannot write the model file '" + path_ + "'");
    }

   private:
    std::string path_;
    std::ofstream file_;
};

/// A model that was read from a file.
struct stored_model {
    model_shape shape;
    std::vector<double> parameters;

    /// *Throws* `bad_input` for a file that cannot be read or is no model of `train_lm --save`.
    explicit stored_model(std::string const& path) {
        std::ifstream in(path, std::ios::binary);
        std::string head;
        if (!in || !(in >> head))
            throw bad_input("cannot read the model file '" + path +
                            "': " + std::generic_category().message(errno));
        in >> shape.layers >> shape.width >> shape.heads >> shape.kv_heads;
        constexpr std::int64_t most = 1 << 20;
        for (auto const number : {shape.layers, shape.width, shape.heads, shape.kv_heads})
            if (!in || head != model_file_head || number < 1 || number > most || in.peek() == EOF)
                throw bad_input("'" + path + "' is no model file of train_lm --save");
        in.get();
        parameters.resize(weights<double>(shape).all().size());
        auto const bytes = static_cast<std::streamsize>(parameters.size() * sizeof(double));
        if (!in.read(reinterpret_cast<char*>(parameters.data()), bytes) || in.get() != EOF)
            throw bad_input("the model file '" + path + "' has not the " +
                            std::to_string(parameters.size()) + " parameters that it names");
    }

    template <class T>
    void copy_to(weights<T>& w) const {
        std::transform(parameters.begin(), parameters.end(), w.all().begin(),
                       [](double value) { return static_cast<T>(value); });
    }
};

}  // namespace lm
