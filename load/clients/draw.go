// Draws a picture of PROMPT: draw HOST:PORT PROMPT FILE. BOTTEGA_API_KEY is the key, if the gateway asks for one.
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"

	bottegav1 "bottega/v1"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
)

func main() {
	if len(os.Args) != 4 {
		log.Fatal("usage: draw HOST:PORT PROMPT FILE")
	}
	if err := draw(os.Args[1], os.Args[2], os.Args[3]); err != nil {
		log.Fatal(err)
	}
}

func draw(address, prompt, file string) error {
	// Over a network: grpc.WithTransportCredentials(credentials.NewTLS(...)).
	connection, err := grpc.Dial(address, grpc.WithInsecure())
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx := context.Background()
	if key := os.Getenv("BOTTEGA_API_KEY"); key != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+key)
	}
	client := bottegav1.NewImageServiceClient(connection)
	events, err := client.Generate(ctx, &bottegav1.GenerateRequest{
		Spec: &bottegav1.GenerationSpec{Prompt: prompt, Seed: proto.Uint64(7)},
	})
	if err != nil {
		return err
	}
	for {
		answer, err := events.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if progress := answer.GetEvent().GetProgress(); progress != nil {
			fmt.Printf("step %d of %d\n", progress.StepsDone, progress.StepsTotal)
		}
		if answer.GetEvent().GetCompleted() != nil {
			if err := save(ctx, client, answer.GetEvent().GetJobId(), file); err != nil {
				return err
			}
		}
	}
}

func save(ctx context.Context, client bottegav1.ImageServiceClient, job, file string) error {
	parts, err := client.GetImage(ctx, &bottegav1.GetImageRequest{JobId: job})
	if err != nil {
		return err
	}
	target, err := os.Create(file)
	if err != nil {
		return err
	}
	defer target.Close()
	for {
		part, err := parts.Recv()
		if err == io.EOF {
			return target.Close()
		}
		if err != nil {
			return err
		}
		if _, err := target.Write(part.GetChunk()); err != nil {
			return err
		}
	}
}
