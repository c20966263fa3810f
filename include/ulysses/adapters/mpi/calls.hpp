#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>

// The C++ bindings, which MPI has long removed, are never wanted.
#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX 1
#endif
#ifndef MPICH_SKIP_MPICXX
#define MPICH_SKIP_MPICXX 1
#endif
#include <mpi.h>

#include <cstddef>
#include <string>
#include <string_view>

/// MPI's calls as the communicator makes them: codes become errors, and bytes are counted past 2^31.
namespace ulysses::inline ULYSSES_ABI::mpi::detail {

/// MPI's own text of an error.
inline std::string text_of(int code) {
    char text[MPI_MAX_ERROR_STRING] = {};
    int length = 0;
    MPI_Error_string(code, text, &length);
    return {text, static_cast<std::size_t>(length)};
}

/// *Throws* `transport_error` with MPI's text.
inline void check(int code, std::string_view operation) {
    if (code != MPI_SUCCESS)
        raise(errc::transport, {}, operation, "MPI reported an error", text_of(code));
}

/// Whether MPI has been initialised, and not finalised yet. Else each other call of MPI ends the job.
inline bool is_running() {
    int initialised = 0, finalised = 0;
    MPI_Initialized(&initialised);
    MPI_Finalized(&finalised);
    return initialised != 0 && finalised == 0;
}

/// As much as one call that counts in `int` is given.
inline constexpr std::size_t most_bytes = std::size_t{1} << 30;

/// So many bytes as one element of a type of its own, for calls that count in `int`.
class bytes_type {
   public:
    explicit bytes_type(std::size_t bytes) {
        constexpr auto block = most_bytes;
        auto const blocks = bytes / block;
        MPI_Datatype whole = MPI_DATATYPE_NULL;
        check(MPI_Type_contiguous(static_cast<int>(block), MPI_BYTE, &whole), "bytes_type");
        int const counts[] = {static_cast<int>(blocks), static_cast<int>(bytes % block)};
        MPI_Aint const places[] = {0, static_cast<MPI_Aint>(blocks * block)};
        MPI_Datatype const types[] = {whole, MPI_BYTE};
        check(MPI_Type_create_struct(2, counts, places, types, &type_), "bytes_type");
        MPI_Type_free(&whole);
        check(MPI_Type_commit(&type_), "bytes_type");
    }
    bytes_type(bytes_type const&) = delete;
    bytes_type& operator=(bytes_type const&) = delete;
    /// Calls that have begun keep it.
    ~bytes_type() { MPI_Type_free(&type_); }

    MPI_Datatype get() const { return type_; }

   private:
    MPI_Datatype type_ = MPI_DATATYPE_NULL;
};

#if MPI_VERSION >= 4
inline int isend(void const* data, std::size_t bytes, int peer, int tag, MPI_Comm comm,
                 MPI_Request* request) {
    return MPI_Isend_c(data, static_cast<MPI_Count>(bytes), MPI_BYTE, peer, tag, comm, request);
}
inline int irecv(void* data, std::size_t bytes, int peer, int tag, MPI_Comm comm,
                 MPI_Request* request) {
    return MPI_Irecv_c(data, static_cast<MPI_Count>(bytes), MPI_BYTE, peer, tag, comm, request);
}
#else
/// Calls `call(count, type)` for so many bytes.
template <class Call>
int counted(std::size_t bytes, Call const& call) {
    if (bytes <= most_bytes) return call(static_cast<int>(bytes), MPI_BYTE);
    return call(1, bytes_type(bytes).get());
}
inline int isend(void const* data, std::size_t bytes, int peer, int tag, MPI_Comm comm,
                 MPI_Request* request) {
    return counted(bytes, [&](int count, MPI_Datatype type) {
        return MPI_Isend(data, count, type, peer, tag, comm, request);
    });
}
inline int irecv(void* data, std::size_t bytes, int peer, int tag, MPI_Comm comm,
                 MPI_Request* request) {
    return counted(bytes, [&](int count, MPI_Datatype type) {
        return MPI_Irecv(data, count, type, peer, tag, comm, request);
    });
}
#endif

}  // namespace ulysses::inline ULYSSES_ABI::mpi::detail
