"""The wire: stubs of the contract, codecs of tensors, requests and streams, fingerprints, error mapping, channels.

A client uses it in this order (nothing here imports torch before a half-precision tensor is converted):

    from opd.wire import bounds, channel, decoder, head, request, status
    security = channel.ClientSecurity(ca_file="ca.pem", token_file="token")        # ClientSecurity() for no TLS, no
    token
    async with channel.open_channel("host:9000", security) as ch:                  # keepalive, backoff, no retries
        stub = teacher_pb2_grpc.TeacherServiceStub(ch)
        info = (await stub.Describe(pb.DescribeRequest(teacher="t"), metadata=security.metadata())).teachers[0]
        limits = bounds.RequestBounds.from_info(info)
        bounds.check_items(items, spec, temperature, limits)                      # InvalidRequestError before sending
        message = request.build_score_request(items, spec, teacher="t", request_id="r1", temperature=1.0)
        stream = decoder.ScoreStreamDecoder(items, spec, limits, request_id="r1")
        try:
            async for response in stub.Score(message, timeout=60, metadata=security.metadata()):
                for index, scores in stream.feed(response):    # as soon as a sequence is complete
                    ...                                         # CorruptPayloadError on any violation
            results = stream.finish()                           # list[Scores] with timings
        except grpc.RpcError as error:
            raise status.error_from_rpc(error) from error                          # an opd.errors class
    head.HeadStreamDecoder().feed(response) / .finish() -> Head                    # GetHead
    tokenizer.TokenizerStreamDecoder().feed(response) / .finish() -> bytes         # GetTokenizer

A server uses `request.parse_score_request`, `encoder.encode_scores`, `encoder.chunk_messages`, `head.encode_head`,
`tokenizer.encode_tokenizer`, `status.status_of` and `fingerprint`.
"""
